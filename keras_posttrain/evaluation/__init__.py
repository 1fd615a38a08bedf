"""Evaluation of tasks: pass@k, win rates, and other libraries' benchmarks."""

__all__ = []
