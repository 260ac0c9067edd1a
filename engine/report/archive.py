"""All completions of a step on disk: completions-<rank>.jsonl.gz, a gzip member for each step."""

import gzip
import json
import os
import zlib
from pathlib import Path

from engine.core.files import json_line
from engine.core.types import Trajectory


def append_completions(
    file: Path, step: int, questions: list[dict], groups: list[list[Trajectory]]
) -> None:
    """Append this rank's completions of a step, in one write."""
    lines = [
        json_line(
            {
                "step": step,
                "question": question,
                "text": t.text,
                "parts": t.reward_parts,
                "advantage": t.advantage,
                "tokens": len(t.completion.token_ids),
                "truncated": t.completion.truncated,
            }
        )
        for question, group in zip(questions, groups, strict=True)
        for t in group
    ]
    with file.open("ab") as opened:
        opened.write(gzip.compress("".join(lines).encode()))


def cut_completions(file: Path, step: int) -> None:
    """Cut off the members of later steps than `step`, and one that a kill has torn."""
    end = 0
    with file.open("rb") as opened:
        while True:
            member, text = zlib.decompressobj(wbits=31), b""  # 31 is a gzip member
            try:
                while not member.eof and (chunk := opened.read(1 << 20)):
                    text += member.decompress(chunk)
            except zlib.error:
                break
            if not member.eof or json.loads(text.partition(b"\n")[0])["step"] > step:
                break
            end = opened.tell() - len(member.unused_data)
            opened.seek(end)
    os.truncate(file, end)
