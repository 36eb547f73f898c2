"""How the product of a query and a key becomes the weight of the key's value."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["softmax", "silu", "gelu", "relu", "identity"]


@dataclass(frozen=True)
class Kind:
    """weight = activation(inside * q.k) * outside, of all keys or, if causal, of earlier ones.

    `inside` is 1 / sqrt(D) where not given. Softmax is over the keys; the others take each score
    by itself, so that many likes weigh more than one (HSTU, 2402.17152: silu, causal, outside 1/N;
    GDPA, Kunlun 2602.10016: gelu or silu). N there is the longest history of a configuration, not
    of a batch: scores may not depend on who else is in it. Papers scale inside, Meta's kernel
    outside; both are here.
    """

    activation: Activation = "softmax"
    causal: bool = False
    inside: float | None = None
    outside: float = 1.0

    def scale(self, head: int) -> float:
        """The factor inside, for heads of width `head`."""
        return head**-0.5 if self.inside is None else self.inside


SOFTMAX = Kind()
CAUSAL = Kind(causal=True)
