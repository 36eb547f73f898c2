"""The pipeline on Airflow: raw, tables, gem, rankers and maintenance DAGs, one run a day each."""
