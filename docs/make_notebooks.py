"""Run the notebooks of the documentation, or the one that is named, and keep what they show: `make notebooks`."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PLACE = Path(__file__).parent / "notebooks"


def main() -> None:
    os.environ |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for path in sorted(PLACE.glob(f"{sys.argv[1] if sys.argv[1:] else '*'}.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:  # what the cells write goes there
            NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":  # warnings name folders of this machine
                cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
                for stream in (one for one in cell.outputs if "text" in one):
                    stream.text = re.sub(
                        r"\x1b\[[\d;]*m| *\r(?=\n)", "", stream.text
                    )  # bold, and a terminal's line ends
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    main()
