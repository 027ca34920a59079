"""The paper, reproduced: its tables and figures as grids of cells, the runner, the tables and plots, the search."""
