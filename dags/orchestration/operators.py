"""Operators of the pipeline: Spark steps by spark-submit, torch steps by a configured launcher."""

import json
import re
import shlex
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import BaseHook, BaseOperator
from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy
from airflow.sdk.exceptions import AirflowException
from typing_extensions import override

from dags.orchestration.settings import ROOT, DagSettings
from dags.pipeline import SurfaceCommand
from dags.steps import Engine, ModelFlags, Step
from etl.errors import UserError

DEFAULT_POOL = "default_pool"
# Names of the connections, and of the pools.
SPARK_CONN_ID = "gemline_spark"
TORCH_CONN_ID = "gemline_torch"
EXIT_CODE_PATTERN = re.compile(r"(?:Error code is: |exit code )(\d+)")


class RetryUnlessUserError(RetryPolicy):
    """Fails immediately on user errors, which a retry cannot fix."""

    @override
    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Any = None,
    ) -> RetryDecision:
        """Fail on exit code 2; otherwise the task's own `retries` apply."""
        code = EXIT_CODE_PATTERN.search(str(exception))
        if code and int(code[1]) == UserError.exit_code:
            return RetryDecision.fail("the step refused its input; the reason is in its log")
        return RetryDecision.default()


DEFAULT_ARGS = {
    "owner": "gemline",
    "retries": 3,
    "retry_policy": RetryUnlessUserError(),
    "retry_delay": timedelta(minutes=1),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(hours=1),
    "execution_timeout": timedelta(hours=12),
}


class GemlineOperator(BaseOperator):
    """Runs a command of `gemline`; its XCom result is the last line that the command prints.

    The extra of the connection `gemline_torch` may define `python`, the command that starts Python
    (such as `docker exec gemline python`), and `launch`, the command that replaces it for
    distributed training (such as `srun torchrun --nnodes 4 …`). Raises AirflowException with the
    exit code where the command fails.
    """

    template_fields: Sequence[str] = ("command",)

    def __init__(
        self, *, command: Sequence[Any], is_distributed: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**{"pool": TORCH_CONN_ID, **kwargs})
        self.command = list(command)
        self.is_distributed = is_distributed
        self._hook = SubprocessHook()

    @override
    def execute(self, context: Any) -> str:
        """Run the command."""
        command_line = [*self.launch_command(), "-m", "gemline", *map(str, self.command)]
        self.log.info("%s", shlex.join(command_line))
        result = self._hook.run_command(command_line, cwd=str(ROOT))
        if result.exit_code:
            raise AirflowException(
                f"gemline {self.command[0]} ended with exit code {result.exit_code}"
            )
        return str(result.output)

    def launch_command(self) -> list[str]:
        """The part of the command line before `-m gemline`."""
        extra = BaseHook.get_connection(TORCH_CONN_ID).extra_dejson
        python = extra.get("python", "python")
        return shlex.split(extra.get("launch", python) if self.is_distributed else python)

    def on_kill(self) -> None:
        """Terminate the command with the task."""
        self._hook.send_sigterm()  # type: ignore[no-untyped-call]


class PublishAssetOperator(GemlineOperator):
    """Publishes the metadata of tables in an event of the task's one asset.

    It runs in the default pool, so that it does not wait for training.
    """

    template_fields: Sequence[str] = ("command", "run")

    def __init__(self, *, run: Any, **kwargs: Any) -> None:
        super().__init__(**{"pool": DEFAULT_POOL, **kwargs})
        self.run = run

    @override
    def execute(self, context: Any) -> str:
        """Run `gemline etl table-info` and add its output to the asset event."""
        table_info = super().execute(context)
        run = json.loads(self.run)
        run["tables"] |= json.loads(table_info)
        (asset,) = self.outlets
        event = context["outlet_events"][asset]
        event.extra = run
        event.add_partitions(run["last"])
        return table_info


def operator_for_step(step: Step, settings: DagSettings, flags: Sequence[str] = ()) -> Any:
    """The operator that runs a step with further flags."""
    command = [*step.command, *flags]
    return create_operator(step.name, step.engine, command, settings, step.is_distributed)


def create_operator(
    task_id: str,
    engine: Engine,
    command: Sequence[Any],
    settings: DagSettings,
    is_distributed: bool = False,
    **kwargs: Any,
) -> Any:
    """The operator that runs a command on an engine."""
    if engine == "torch":
        return GemlineOperator(
            task_id=task_id, command=command, is_distributed=is_distributed, **kwargs
        )
    properties = settings.spark_properties
    return SparkSubmitOperator(
        task_id=task_id,
        conn_id=SPARK_CONN_ID,
        pool=SPARK_CONN_ID,
        name=f"gemline {task_id}",
        application=str(ROOT / "gemline.py"),
        application_args=list(command),
        jars=settings.spark_jars,
        properties_file=str(properties) if properties else None,
        **kwargs,
    )


def surface_operator(
    command: SurfaceCommand,
    settings: DagSettings,
    model_flags: ModelFlags,
    surface: Any,
    flags: Sequence[str] = (),
) -> Any:
    """The operator of a command in a mapped task group, labeled by its surface."""
    words = command.for_surface(settings.paths, model_flags, surface)
    templated_field = "application_args" if command.engine == "spark" else "command"
    return create_operator(
        command.name,
        command.engine,
        (*words, *flags),
        settings,
        map_index_template=f"{{{{ task.{templated_field}[{len(words) - 1}] }}}}",
    )
