"""Delta tables of a lake: schemas, reads and writes, versions, leases, pins and maintenance."""
