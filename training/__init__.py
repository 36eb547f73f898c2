"""Training of GEM, the foundation model over all surfaces, and of its teacher outputs.

The Python API is imported on first use, so that `import training` needs no torch:

    from training import ExampleDataset, load_gem

    gem = load_gem("work/demo/lake", "conf/specs/simulator.yaml")
    for batch in gem.dataset(("2026-01-01", "2026-01-03")):
        click = gem.predict(batch)["click"]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.api import ExampleDataset, TrainedGem, load_gem

__all__ = ["ExampleDataset", "TrainedGem", "load_gem"]


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("training.api"), name)
