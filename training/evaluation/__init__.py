"""Evaluation of predictions: metrics, bootstrap intervals, prequential drift."""
