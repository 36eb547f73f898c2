"""A small shop: two surfaces, a log of what its app shows and a sparse one of its sales."""

from pathlib import Path

from etl.spec import load_spec
from etl.tables.lake import Lake

SPEC = """
name: shop
buckets: 1
surfaces: {home: {}, search: {}}
events:
  shown: {kind: ad, role: impression}
  click: {kind: ad, role: outcome}
  buy: {kind: ad, role: outcome}
objectives: {click: {event: click, window: 1h}}
attributes: {context: {phone: {type: categorical}}}
sequences: {behaviour: {}}
counters: {windows: [1h], events: [shown], keys: [[user]]}
sources:
  app:
    kind: event_log
    format: json
    path: app/{day}.json
    time_unit: s
    columns: {event_id: id, user: who, item: what, surface: page, type: action, event_time: at}
    types: {shown: shown, click: click}
  sales:
    kind: event_log
    format: json
    path: sales/{day}.json
    time_unit: s
    sparse: true
    columns: {event_id: id, user: who, item: what, surface: page, event_time: at, impression: imp}
    event: buy
"""


def shop_lake(folder: Path) -> Lake:
    """The lake of the shop, without tables, and its spec in a folder."""
    (folder / "spec.yaml").write_text(SPEC)
    return Lake(str(folder / "lake"), load_spec(folder / "spec.yaml"))
