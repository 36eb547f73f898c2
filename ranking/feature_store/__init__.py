"""The online feature store: an embedded database (LMDB) built from tables and fed by live events.

`materialize` builds a store from a lake's tables, `wal` and `ingest` apply posted events and
attributes to it, `fetch` reads a ranker's inputs for a `request`, and `consistency` compares these
with the features computed offline.
"""
