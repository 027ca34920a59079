"""The paper, reproduced: its tables and figures as grids of cells, the runner, the tables and plots."""

__all__: list[str] = []
