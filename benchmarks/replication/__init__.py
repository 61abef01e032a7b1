"""The paper's table, figures and claims, made again on public data. One script a question."""
