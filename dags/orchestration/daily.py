"""The daily pipeline on Airflow: DAGs that are each triggered by an asset of the one before.

    raw logs of a day -> events, features -> GEM, teacher predictions -> a ranker per surface

A further DAG refreshes the current day by the hour, and one removes old files.

Each asset has one partition per day. An event of an asset names the days that were processed and,
for each table, its version, row count and schema fingerprint. The next DAG reads those versions
even if newer ones are written meanwhile. Each table is written by one DAG, and a DAG has one active
run at a time.

Settings are environment variables (`dags.orchestration.settings`). The connections and pools
`gemline_spark` and `gemline_torch` define where steps run and how many run at once.
"""

from dags.orchestration.builders import gem_dag, maintenance_dag, rankers_dag, raw_dag, tables_dag
from dags.orchestration.dag_factory import DagFactory
from dags.orchestration.refresh import refresh_dag
from dags.orchestration.settings import DagSettings
from etl.spec import load_spec

DAG_BUILDERS = (raw_dag, tables_dag, gem_dag, rankers_dag, refresh_dag, maintenance_dag)
settings = DagSettings.from_environment()
if settings:
    factory = DagFactory(load_spec(settings.spec), settings)
    for build_dag in DAG_BUILDERS:
        dag = build_dag(factory)
        globals()[dag.dag_id] = dag
