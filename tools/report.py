"""Write a page to look at a run: its curves, its evaluations, its rollouts token by token.

    python -m tools.report runs/x                       # writes runs/x/report.html
    python -m tools.report runs/x --out elsewhere.html
    python -m tools.report runs/x --serve               # live, see tools/serve.py

The page is tools/report.html with the run's data in it. It needs no server and no network, and can
be written while the run still trains. Of a long run it shows only some of the evaluations and steps
that were recorded, and says how many are left out.
"""

import argparse
import time
from pathlib import Path

from engine.core.files import check_replaceable
from engine.run.mistakes import mistakes_cost_one_line
from tools.page import TEMPLATE, read_run, to_json
from tools.serve import serve


def write_report(folder: Path, out: Path) -> None:
    """Write the page of the run in `folder`; raises OSError or ValueError with the file's name."""
    check_replaceable(out)
    page = TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", to_json(read_run(folder)))
    out.parent.mkdir(parents=True, exist_ok=True)
    if out == folder / "report.html":
        out.unlink(missing_ok=True)  # a link there may lead to somebody's file
    out.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, help="the page's file; by default report.html in it")
    parser.add_argument("--serve", action="store_true", help="show it live, and ask its models")
    parser.add_argument("--port", type=int, default=8008, help="of --serve; 0 takes a free one")
    parser.add_argument("--device", default="cpu", help="that answers under --serve")
    parser.add_argument("--config", type=Path, help="under --serve: trust a task of your own")
    options = parser.parse_args()
    folder = options.folder = options.folder.expanduser()
    out = (options.out or folder / "report.html").expanduser()
    with mistakes_cost_one_line():
        if options.serve and not (folder / "metrics.jsonl").is_file():
            print(f"waiting for the run in {folder}; Ctrl-C ends it", flush=True)
        while options.serve and not (folder / "config.yaml").is_file():
            time.sleep(0.2)  # it was just started, and loads its model
        if options.serve:
            return serve(options)
        write_report(folder, out)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
