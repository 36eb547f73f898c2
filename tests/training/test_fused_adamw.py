"""AdamW that collects its tensors once makes the same steps as PyTorch's own."""

from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, equal, randn
from torch.optim import AdamW

from training.trainer.fused_adamw import FusedAdamW

STEPS = st.lists(
    st.tuples(st.sets(st.integers(0, 3), min_size=1), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=20)
@given(STEPS)
def test_steps_equal_those_of_pytorch(steps: list[tuple[set[int], bool]]) -> None:
    """Each step has the gradients of some weights, at a new rate; some go back to a checkpoint."""
    generator = Generator().manual_seed(0)
    start = [randn(3, 2, generator=generator) for _ in range(4)]
    ours, theirs = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    fused = FusedAdamW(ours, lr=0.1, weight_decay=0.01)
    reference = AdamW(theirs, lr=0.1, weight_decay=0.01, fused=True)
    checkpoint = None
    for number, (with_gradient, is_restarted) in enumerate(steps):
        if is_restarted and checkpoint:
            fused.load_state_dict(deepcopy(checkpoint))
            reference.load_state_dict(deepcopy(checkpoint))
        gradients: list[Tensor | None] = [
            randn(3, 2, generator=generator) if weight in with_gradient else None
            for weight in range(4)
        ]
        for weights, optimizer in ((ours, fused), (theirs, reference)):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = None if gradient is None else gradient.clone()
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            optimizer.step()
        checkpoint = checkpoint or deepcopy(reference.state_dict())
        assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))
