"""The line's DAGs, a file each, in order: raw, tables, gem, rankers; and upkeep."""
