"""How a step runs: Spark's by spark-submit, the others by a launcher; both named by connections."""

import json
import re
import shlex
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import BaseHook, BaseOperator
from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy
from airflow.sdk.exceptions import AirflowException

from dags.line import Step
from dags.settings import ROOT, Settings

DEFAULT_POOL = "default_pool"
SPARK, TORCH = "gemline_spark", "gemline_torch"  # connections, and pools of the same names
EXIT_CODE = re.compile(r"(?:Error code is: |exit code )(\d+)")
USERS_ERROR = 2


class ByCause(RetryPolicy):
    """What the data or the user did wrong is the same an hour later: such a step fails at once."""

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Any = None
    ) -> RetryDecision:
        """Fail on exit code 2, else let the task's own retries decide."""
        code = EXIT_CODE.search(str(exception))
        if code and int(code[1]) == USERS_ERROR:
            return RetryDecision.fail("the step refused its input; its log tells the reason")
        return RetryDecision.default()


DEFAULTS = {
    "owner": "gemline",
    "retries": 3,
    "retry_policy": ByCause(),
    "retry_delay": timedelta(minutes=1),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(hours=1),
    "execution_timeout": timedelta(hours=12),
}


class GemlineOperator(BaseOperator):
    """A command of `gemline`, where the connection says; its result is the last line it prints.

    The connection's extra may tell `python`, the words that start Python there (such as
    `docker exec gemline python`), and `launch`, the words in their place for what is trained
    by many processes (such as `srun torchrun --nnodes 4 …`). Raises AirflowException with the exit
    code where the command fails.
    """

    template_fields: Sequence[str] = ("command",)

    def __init__(self, *, command: Sequence[Any], trains: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"pool": TORCH, **kwargs})
        self.command = list(command)
        self.trains = trains
        self._hook = SubprocessHook()

    def execute(self, context: Any) -> str:
        """Run the command."""
        words = [*self.launcher(), "-m", "gemline", *map(str, self.command)]
        self.log.info("%s", shlex.join(words))
        done = self._hook.run_command(words, cwd=str(ROOT))
        if done.exit_code:
            raise AirflowException(
                f"gemline {self.command[0]} ended with exit code {done.exit_code}"
            )
        return str(done.output)

    def launcher(self) -> list[str]:
        """The words before `-m gemline`."""
        extra = BaseHook.get_connection(TORCH).extra_dejson
        python = extra.get("python", "python")
        return shlex.split(extra.get("launch", python) if self.trains else python)

    def on_kill(self) -> None:
        """End the command with the task."""
        self._hook.send_sigterm()


class Publish(GemlineOperator):
    """Puts what is known of tables into the event of the task's one asset.

    It takes no slot of the pool in which models are trained.
    """

    template_fields: Sequence[str] = ("command", "run")

    def __init__(self, *, run: Any, **kwargs: Any) -> None:
        super().__init__(**{"pool": DEFAULT_POOL, **kwargs})
        self.run = run

    def execute(self, context: Any) -> str:
        """Read version, rows and contract of the tables, and put them into the event."""
        said = super().execute(context)
        run = json.loads(self.run)
        run["tables"] |= json.loads(said)
        (asset,) = self.outlets
        event = context["outlet_events"][asset]
        event.extra = run
        event.add_partitions(run["last"])
        return said


def operator_of(step: Step, settings: Settings, flags: Sequence[str] = (), **kwargs: Any) -> Any:
    """The operator that runs a step with further flags."""
    command = [*step.command, *flags]
    if step.engine == "spark":
        return SparkSubmitOperator(
            **{"task_id": step.name, **kwargs},
            conn_id=SPARK,
            pool=SPARK,
            name=f"gemline {step.name}",
            application=str(ROOT / "gemline.py"),
            application_args=command,
            jars=settings.spark_jars,
            properties_file=_text(settings.spark_properties),
        )
    return GemlineOperator(
        **{"task_id": step.name, **kwargs}, command=command, trains=step.name == "gem"
    )


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
