"""The line by day, on Airflow: a DAG for each part of it, from one partitioned asset to the next.

    raw day -> events, features -> GEM, knowledge -> a ranker a surface

What a part has made is told by an event of its asset: the days, and of each table its version, its
rows and a hash of its contract. The next part reads those versions, whatever is written meanwhile.
Each table is written by one DAG, and a DAG has one run at a time.

Settings come from the environment (`dags.settings`); connections and pools `gemline_spark` and
`gemline_torch` tell where steps run, and how many at once.
"""

from dags.parts.gem import gem
from dags.parts.part import Line
from dags.parts.rankers import rankers
from dags.parts.raw import raw
from dags.parts.tables import tables
from dags.parts.upkeep import upkeep
from dags.settings import Settings
from etl.spec import load_spec

PARTS = (raw, tables, gem, rankers, upkeep)
settings = Settings.from_environment()
if settings:
    line = Line(load_spec(settings.spec), settings)
    for part in PARTS:
        made = part(line)
        globals()[made.dag_id] = made
