"""How every method of the settling benchmark trains a stack of runs.

All get the same samples, the same number of steps and the same number of replicas. Methods whose
replicas stay equal (a plain schedule; hdet after its scout; LR-free optimizers) are one row of a
fleet each, with the whole batch; the others are one row for each replica. hdet's own decisions
(where to look, what to choose, when to go back) are the library's: tests/benchmarks/test_methods.py
shows that a row ends with the weights of `hdet.HDET` over stacked replicas.
"""
