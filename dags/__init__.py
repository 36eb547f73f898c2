"""The pipeline: its steps, the local runner, and the Airflow DAGs. It builds commands only."""
