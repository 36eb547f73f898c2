"""The pipeline on Airflow: daily raw, tables, gem, rankers and maintenance DAGs, hourly refresh."""
