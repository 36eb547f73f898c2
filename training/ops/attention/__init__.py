"""Attention over ragged sequences.

Q, K, V are (N, H, D): N positions of all sequences one after another, H heads, D width of a head;
offsets (S+1) cut them into S sequences. Self, pooling, target and personalised attention differ in
where queries and keys come from; a `Kind` tells how scores become weights.
"""

from training.ops.attention.dispatch import attention
from training.ops.attention.kinds import CAUSAL, SOFTMAX, Kind
from training.ops.attention.reference import attention as reference

__all__ = ["CAUSAL", "SOFTMAX", "Kind", "attention", "reference"]
