"""Raw values of attributes as the types in which tables store them."""

import re
from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.ingest.readers import raw_value
from etl.spec.attributes import LoggedAttribute, MultiCategoricalAttribute, VectorAttribute
from etl.tables.declared_columns import logged_sql_type


def attribute_value(attribute: LoggedAttribute, column: str) -> Column:
    """The typed value of an attribute in a raw column; null if missing or of another type.

    A vector of another width than the declared one is null. Several values are in ascending order,
    without empty ones and repetitions.
    """
    raw, sql_type = raw_value(column), logged_sql_type(attribute)
    if isinstance(attribute, VectorAttribute):
        width = attribute.width
        return evaluate_once(F.from_json(raw, sql_type), lambda v: F.when(F.size(v) == width, v))
    if isinstance(attribute, MultiCategoricalAttribute):
        if attribute.separator is None:
            values = F.from_json(raw, sql_type)
        else:
            values = F.split(F.trim(raw), f" *{re.escape(attribute.separator)} *")
        return F.array_sort(F.array_distinct(F.filter(values, lambda value: value != "")))
    return raw.try_cast(sql_type)


def evaluate_once(value: Column, body: Callable[[Column], Column]) -> Column:
    """`body` of a value that is computed once, although `body` uses it several times."""
    return F.element_at(F.transform(F.array(value), body), 1)
