"""Sources that deliver files by day besides logs: labels of data providers, audits, and spend."""

from typing import Literal

from pydantic import model_validator

from etl.spec.base import AudienceName, StrictModel
from etl.spec.file_source import FileSource


class ReportSource(FileSource):
    """Files that are delivered once a day."""

    @model_validator(mode="after")
    def _check_day_in_path(self) -> "ReportSource":
        if not self.is_partitioned_by_day:
            raise ValueError(
                "labels, audits and spend come by day: put {day} into the path, or name the "
                "`partition_column` of a Delta table"
            )
        return self


class AudienceLabelColumns(StrictModel):
    """Raw columns of labels that data providers give users."""

    provider: str
    """Name of the provider, one of `audiences.*.providers`."""
    user: str
    """Id of the user."""
    label: str
    """What the provider states of the user; null or `unknown` if it does not know the user."""
    valid_from: str
    """When the provider delivered the label, in `time_unit`."""


class AudienceLabelSource(ReportSource):
    """Labels of users by data providers: one row per label, valid until the provider's next one."""

    kind: Literal["audience_labels"]
    """`audience_labels`: labels that data providers give users."""
    audience: AudienceName
    """Which of the `audiences` the labels are about."""
    columns: AudienceLabelColumns
    """Raw columns of the labels."""


class AuditColumns(StrictModel):
    """Raw columns of an auditor's reports."""

    campaign: str
    """The audited campaign: a value of the attribute `audiences.*.campaign`."""
    true_class: str
    """One of `audiences.*.classes`."""
    share: str
    """Share of the class among the audited impressions, from 0 to 1."""
    count: str
    """Number of audited impressions of the campaign on the day."""


class AuditSource(ReportSource):
    """Reports of an auditor: one row per campaign, day and class; the shares of a report sum to 1.

    A report is about impressions that landed on the day in its path.
    """

    kind: Literal["audits"]
    """`audits`: shares of the true classes among the impressions of campaigns."""
    audience: AudienceName
    """Which of the `audiences` the reports are about."""
    columns: AuditColumns
    """Raw columns of the reports."""


class SpendColumns(StrictModel):
    """Raw columns of what campaigns spent."""

    campaign: str
    """The campaign: a value of the attribute `roi.campaign`."""
    spend: str
    """What the campaign was billed on the day, in `roi.currency`."""
    incremental_share: str | None = None
    """Share of the campaign's attributed conversions that an experiment found to be due to it.

    May be empty on days without a new result: the latest one counts.
    """


class SpendSource(ReportSource):
    """What each campaign was billed for the day in the path: one row per campaign."""

    kind: Literal["spend"]
    """`spend`: what campaigns were billed."""
    columns: SpendColumns
    """Raw columns of the rows."""
