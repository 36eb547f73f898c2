"""A small shop with two surfaces, a log of its app and an optional log of its sales."""

from pathlib import Path

from etl.spec import load_spec
from etl.tables.lake import Lake

SPEC = """
name: shop
buckets: 1
surfaces: {home: {}, search: {}}
events:
  shown: {role: impression}
  click: {role: outcome}
  buy: {role: outcome}
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
    optional: true
    columns: {event_id: id, user: who, item: what, surface: page, event_time: at, impression: imp}
    event: buy
"""


def shop_lake(folder: Path) -> Lake:
    """Write the shop's spec into a folder; returns its lake, without tables."""
    (folder / "spec.yaml").write_text(SPEC)
    return Lake(str(folder / "lake"), load_spec(folder / "spec.yaml"))
