"""Attributes of a raw record in Python, each as ingest reads it from a log with the same record.

A service that is sent the raw columns of an impression computes the columns of `select` by the
same expressions as the logs.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence

from etl.errors import UserError
from etl.spec.attributes import (
    LoggedAttribute,
    MultiCategoricalAttribute,
    NumericAttribute,
    VectorAttribute,
)
from etl.spec.expression_terms import Record
from etl.spec.expression_values import double_of_text, text_of_boolean, text_of_number
from etl.spec.expressions import parse_column
from etl.spec.model import DataSpec
from etl.spec.sources import AttributeSource, EventLogSource, ImpressionLogSource
from etl.tables.declared_columns import logged_context_attributes

# A raw column of JSON: a text, number or boolean, a list or an object of these, or null.
RawRecord = Mapping[str, object]
RecordSource = EventLogSource | ImpressionLogSource | AttributeSource
AttributeValue = str | float | Sequence[str] | Sequence[float] | None


def attributes_of_record(
    spec: DataSpec, source_name: str | None, record: RawRecord
) -> dict[str, AttributeValue]:
    """The attributes in a record of a source, by name: those of the context for a log.

    Missing values are None. Without a name, the source is the only log of impressions.

    Raises:
        UserError: There is no such source of events or attributes, or none is named of several; or
            a value has another type than the attribute, so that ingest would quarantine the record.
    """
    source = _source_of(spec, source_name)
    if isinstance(source, AttributeSource):
        declared = getattr(spec.attributes, source.entity)
    else:
        declared = logged_context_attributes(spec)
    texts = {name: _text_of(value) for name, value in record.items()}
    return {
        name: _typed_value(name, attribute, _column_text(source, attribute.column or name, texts))
        for name, attribute in declared.items()
    }


def _source_of(spec: DataSpec, name: str | None) -> RecordSource:
    """The source of a name, by default the only log of impressions."""
    logs = [
        each
        for each, log in spec.log_sources.items()
        if spec.impression_type in spec.event_types_of(log)
    ]
    if name is None and len(logs) != 1:
        raise UserError(f"name the source of the record: {', '.join(logs)}")
    source = spec.sources.get(name or logs[0])
    if not isinstance(source, RecordSource):
        known = ", ".join(n for n, each in spec.sources.items() if isinstance(each, RecordSource))
        raise UserError(f"{name} is no source of events or attributes; there is {known}")
    return source


def _column_text(source: RecordSource, column: str, texts: Record) -> str | None:
    """A raw column of a record, or one that the source computes."""
    computed = source.select.get(column)
    if computed is None:
        return texts.get(column)
    return _text_of(parse_column(computed).evaluate(texts))


def _text_of(value: object) -> str | None:
    """A value of JSON as the text that readers of logs return."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(text_of_boolean(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return text_of_number(value)
    return json.dumps(value)


def _typed_value(name: str, attribute: LoggedAttribute, text: str | None) -> AttributeValue:
    """The value of a text; raises UserError if it is of another type than the attribute."""
    if text is None:
        return None
    value = _parse(attribute, text)
    if value is None:
        expected = f"a {attribute.type.replace('_', ' ')} attribute"
        if isinstance(attribute, VectorAttribute):
            expected += f" of width {attribute.width}"
        raise UserError(f"{name} of the record is {text[:100]!r}; it is {expected}")
    return value


def _parse(attribute: LoggedAttribute, text: str) -> AttributeValue:
    if isinstance(attribute, NumericAttribute):
        return double_of_text(text)
    if isinstance(attribute, VectorAttribute):
        vector = _list_of(text)
        return _vector(vector) if vector is not None and len(vector) == attribute.width else None
    if isinstance(attribute, MultiCategoricalAttribute):
        return _set_of_values(attribute.separator, text)
    return text


def _vector(values: Sequence[object]) -> list[float] | None:
    """The numbers of a list, NaN where it has null; null if it has anything else."""
    numbers = [math.nan if value is None else value for value in values]
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers):
        return None
    return [float(each) for each in numbers if isinstance(each, int | float)]


def _set_of_values(separator: str | None, text: str) -> list[str] | None:
    """Several values in ascending order, without empty ones and repetitions."""
    if separator is None:
        listed = _list_of(text)
        values = None if listed is None else [_text_of(each) for each in listed]
    else:
        values = list(re.split(f" *{re.escape(separator)} *", text.strip(" ")))
    return None if values is None else sorted({each for each in values if each})


def _list_of(text: str) -> list[object] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None
