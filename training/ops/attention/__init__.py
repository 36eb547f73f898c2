"""Attention over ragged sequences.

Q, K and V are (N, H, D): the N positions of all sequences one after another, H heads, D width of a
head; offsets (S + 1) cut them into S sequences. Self-, pooling, target and personalized attention
differ in where queries and keys come from; an `AttentionKind` defines how scores become weights.
"""

from training.ops.attention.dispatch import attention
from training.ops.attention.reference import CAUSAL, SOFTMAX, AttentionKind
from training.ops.attention.reference import attention as reference

__all__ = ["CAUSAL", "SOFTMAX", "AttentionKind", "attention", "reference"]
