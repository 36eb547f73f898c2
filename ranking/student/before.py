"""What GEM thought of a user's earlier impressions, read by the student of a later one.

R requests, C candidates, K impressions of before, W event width, Z width of what GEM kept, M
attributes by which candidates are compared.
"""

from torch import Tensor, nn

from features.inputs import KEPT_WIDTH
from ranking.student.attention import Look, Seen
from ranking.student.config import StudentConfig
from ranking.student.liking import alike
from training.model.events import AGES, age_bucket


class Before(nn.Module):
    """GEM's view of the user's earlier impressions as tokens (LoopFM, 2605.29280, section 3).

    By attention a candidate looks at all of them, and apart at those that are like it in each
    attribute: what GEM made of this user and such an ad, and how long ago. Else they are pooled.
    """

    def __init__(self, width: int, compared: int, config: StudentConfig) -> None:
        super().__init__()
        self.kept = nn.Linear(KEPT_WIDTH, width)
        self.age = nn.Embedding(AGES, width)
        self.norm = nn.LayerNorm(width)
        self.pooling = config.pooling
        self.seen = Seen(width)
        looks = (1 + compared) * (config.pooling == "attention")
        self.looks = nn.ModuleList(Look(self.seen, config.heads) for _ in range(looks))
        self.pooled_width = 0 if looks else width
        self.looked_width = looks * width

    def forward(self, items: Tensor, kept: Tensor, ages: Tensor) -> Tensor:
        """Projected items (R, K, W), what GEM kept (R, K, Z) and ages (R, K) to (R, K, W)."""
        found: Tensor = self.norm(items + self.kept(kept) + self.age(age_bucket(ages)))
        return found

    def pooled(self, tokens: Tensor, there: Tensor) -> list[Tensor]:
        """The sum or the mean of a user's tokens (R, W); nothing where candidates look."""
        if self.looks:
            return []
        total = (tokens * there[..., None]).sum(1)
        return [total if self.pooling == "sum" else total / there.sum(1, keepdim=True).clamp(min=1)]

    def looked(
        self, items: Tensor, own: Tensor, keys: Tensor, values: Tensor, seen: Tensor, there: Tensor
    ) -> list[Tensor]:
        """What candidates (R, C, W) of attributes (R, C, M) see: (R, C, W) of each look.

        `seen` (R, K, M) are the attributes of the impressions.
        """
        masks = [there[:, None], *(there[:, None] & same for same in alike(own, seen))]
        return [
            look(items, keys, values, mask) for look, mask in zip(self.looks, masks, strict=False)
        ]
