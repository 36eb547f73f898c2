"""A ranker begins from what its domain had learned when its own training ended; nothing later."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from etl.errors import UserError
from etl.tables.lake import Lake
from ranking.student import domain
from ranking.student.config import DomainTraining, StudentConfig, StudentTraining, TransferConfig
from ranking.student.trained import TrainedStudent, new_student
from ranking.train import train_domain, trained
from tests.conftest import FIRST, LAST
from training.data.reader import Reader
from training.knowledge.earlier import Earlier
from training.split import Split
from training.trials import linked

SMALL = StudentConfig(
    max_length=40, row_width=4, event_width=8, hidden=(16, 8), events=8, user_rows=50
)
DAY = LAST - timedelta(days=1)
TILL = Split(
    train_first=FIRST, train_last=DAY, calibration=None, test_first=LAST, test_last=LAST,
    landed=LAST,
)  # fmt: skip


@pytest.fixture
def own(lake: Lake, tmp_path: Path) -> Lake:
    """The same tables, without a model."""
    return linked(lake, tmp_path / "own")


def reader(lake: Lake, surface: str = "feed") -> Reader:
    return Reader.newest(lake, None, 40, (surface,))


def fresh(lake: Lake, seed: int, config: StudentConfig = SMALL) -> TrainedStudent:
    torch.manual_seed(seed)
    own = reader(lake)
    return new_student(own, config, len(own.items), Earlier.nothing())


def parts(model: TrainedStudent) -> dict[str, torch.Tensor]:
    own = model.student.state_dict() | model.tables.state_dict()
    return {name: value.clone() for name, value in own.items()}


def test_what_has_one_size_is_taken_over_and_nothing_else(own: Lake) -> None:
    kept = fresh(own, 0, SMALL.model_copy(update={"hidden": (24, 12)}))
    domain.keep(reader(own), "everywhere", DAY, kept)
    ranker = fresh(own, 1)
    before, theirs = parts(ranker), parts(kept)
    domain.begin(ranker, domain.of_surface(reader(own), DAY))
    for name, mine in parts(ranker).items():
        same = mine.shape == theirs[name].shape
        torch.testing.assert_close(mine, theirs[name] if same else before[name])
    assert torch.equal(parts(ranker)["tables.item.weight"], theirs["tables.item.weight"])
    assert before["row_layer.weight"].shape != theirs["row_layer.weight"].shape


def test_a_model_that_knows_later_days_is_not_begun_from(own: Lake) -> None:
    domain.keep(reader(own), "everywhere", LAST, fresh(own, 0))
    config = StudentTraining(
        model=SMALL, transfer=TransferConfig(kind="none", share=(), begin="domain")
    )
    with pytest.raises(UserError, match=rf"no model of domain everywhere was trained until {DAY}"):
        trained(own, ("feed",), TILL, config, Earlier.nothing())


def test_a_surface_of_no_domain_is_told(own: Lake) -> None:
    spec = own.spec.model_copy(update={"domains": {}})
    with pytest.raises(UserError, match="no domain holds feed: name it under `domains`"):
        domain.of_surface(reader(Lake(own.root, spec)), DAY)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"domains": {"everywhere": ("feed",)}}, "surfaces"), ({"match": ("category",)}, "match")],
)
def test_a_model_that_read_other_things_is_refused(own: Lake, changes: dict, what: str) -> None:
    domain.keep(reader(own), "everywhere", DAY, fresh(own, 0))
    other = Lake(own.root, own.spec.model_copy(update=changes))
    with pytest.raises(UserError, match=f"was trained with {what} .*, now it is"):
        domain.of_surface(reader(other), DAY)


def test_a_damaged_model_is_refused(own: Lake) -> None:
    path = domain.keep(reader(own), "everywhere", DAY, fresh(own, 0))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged; run `gemline rank domain` again"):
        domain.of_surface(reader(own), DAY)


def test_rows_of_another_width_are_refused(own: Lake) -> None:
    domain.keep(reader(own), "everywhere", DAY, fresh(own, 0))
    wide = fresh(own, 1, SMALL.model_copy(update={"row_width": 8}))
    with pytest.raises(UserError, match="of another size in the domain's model: train it alike"):
        domain.begin(wide, domain.of_surface(reader(own), DAY))


@pytest.mark.parametrize(
    "transfer", [{"begin": "domain", "frozen": True}, {"begin": "domain", "share": ["tables"]}]
)
def test_what_is_of_gem_is_not_asked_of_a_domain(transfer: dict) -> None:
    with pytest.raises(ValidationError, match="of GEM's parts, not of a domain's model"):
        TransferConfig.model_validate(transfer)
    with pytest.raises(ValidationError, match="not from itself"):
        DomainTraining.model_validate({"transfer": {"begin": "domain"}})


def test_a_domain_learns_from_all_its_surfaces_and_rankers_go_on_from_there(own: Lake) -> None:
    config = StudentTraining(
        model=SMALL, batch_rows=512, weight_decay=0, transfer=TransferConfig(kind="none")
    )
    train_domain(own, "everywhere", TILL, config.model_copy(update={"passes": 0}))
    untrained = domain.of_surface(reader(own, "messaging"), DAY)
    train_domain(own, "everywhere", TILL, config)
    learned = domain.of_surface(reader(own, "messaging"), DAY)
    moved = (learned["student.surface.weight"] != untrained["student.surface.weight"]).any(1)
    assert moved.tolist() == [False, True, True, True]  # unknown, feed, reels, messaging

    begun = {"passes": 0, "transfer": TransferConfig(kind="none", begin="domain")}
    ranker = trained(own, ("messaging",), TILL, config.model_copy(update=begun), Earlier.nothing())
    for name, mine in parts(ranker).items():
        part = "tables" if name.startswith("tables.") else "student"
        torch.testing.assert_close(mine, learned[f"{part}.{name}"])
