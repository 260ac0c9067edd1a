"""Plant known bugs in copies of the tree, one in each, and see that a quick test fails at each.

    OMP_NUM_THREADS=1 python benchmarks/planted.py               # two at a time, on two cores
    OMP_NUM_THREADS=1 python benchmarks/planted.py --at-once 8
    OMP_NUM_THREADS=1 python benchmarks/planted.py --only top-p

A bug is a regular expression and what takes the place of its match. It is looked for in all Python
files outside tests/ and benchmarks/, and its tests are looked for by name, so that files may move.
The expression must match exactly once. Where the code is rewritten it no longer does, and that is
reported like a bug that no test catches: the expression must then be written anew. First the tests
are run on the tree as it is, since one that fails there shows nothing. Each run of a test is a fork
of a process that has imported the packages.
"""

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT  # a worker's copy, where the bugs are planted
TIMEOUT_S = 120  # of a test that a bug makes hang
PACKAGES = ("torch.distributed.run", "transformers.modeling_utils", "transformers.models.qwen2")
PACKAGES += ("transformers.models.gpt2", "pytest", "datasets", "peft", "bitsandbytes", "mlflow")


class Bug(NamedTuple):
    name: str
    expression: str
    replacement: str
    test: str  # its name, with the file's where two have a test of this name, and a case's [name]


BUGS = [
    Bug(
        "the mask one column late",
        r"completion_mask = (~?)right_pad\((\w+), (True|False)\)",
        r"completion_mask = \1torch.nn.functional.pad(right_pad(\2, \3), (1, -1), value=\3)",
        "test_update::test_an_update_equals_the_reference[grpo-in several]",
    ),
    Bug(
        "no_sync on the last micro-batch too",
        r" and micro_batch is not micro_batches\[-1\]",
        r"",
        "test_an_update_on_several_ranks_equals_the_reference[2]",
    ),
    Bug(
        "denominators per rank",
        r"= world\.sum\(counts\)\.tolist\(\)",
        r"= *counts[:2], world.sum(counts).tolist()[2]",
        "test_an_update_on_several_ranks_equals_the_reference[2]",
    ),
    Bug(
        "a row's bytes seen outside of the adapter's autocast",
        r"with self\.autocast\(\):(\n +return tokens_that_fit)",
        r"with autocast(self.model.device, torch.float32):\1",
        "test_a_rows_memory_is_estimated_in_the_dtype_that_decodes",
    ),
    Bug(
        "the scorer at temperature 1 where sampling has 0.7",
        r"batch\.completion_mask, temperature=policy\.params\.temperature\b",
        r"batch.completion_mask, temperature=1.0",
        "test_update::test_an_update_equals_the_reference[temperature-in several]",
    ),
    Bug(
        "the checkpoint written before the log",
        r"( +)log_step\(run, metrics",
        r"\1save_checkpoint(run)\n\1log_step(run, metrics",
        "test_a_broken_run_goes_on_bit_for_bit[the log]",
    ),
    Bug(
        "the stream's position left out of the checkpoint",
        r'"state": asdict\(state\)',
        r'"state": asdict(state) | {"position": 0}',
        "test_a_broken_run_goes_on_bit_for_bit[an exception]",
    ),
    Bug(
        "the KL reference made of the checkpoint",
        r"( +)resume\(run\)\n",
        r"\1resume(run)\n\1if (policy := run.policy).reference:\n"
        r"\1    policy.reference.model = policy.reference_model(run.config)\n",
        "test_optimizer::test_a_run_in_two_parts_is_the_unbroken_one",
    ),
    Bug(
        "top-p applied before the temperature",
        r"keep_likeliest\(probs, params\.top_p, params\.top_k\)",
        r"probs * (keep_likeliest((logits * params.temperature).softmax(dim=-1), params.top_p, "
        r"params.top_k) > 0)",
        "test_truncated_sampling_draws_from_what_transformers_keeps",
    ),
    Bug(
        "an end token not trained",
        r"torch\.from_numpy\(~completion\.is_inserted\)",
        r"torch.tensor([*~completion.is_inserted[:-1], completion.truncated])",
        "test_update::test_an_update_equals_the_reference[grpo-one by one]",
    ),
    Bug(
        "a zero-advantage row left out of the denominator",
        r"counts = \[len\(batch\), sum\((.*?) for t in kept\)",
        r"counts = [len(trained), sum(\1 for t in trained)",
        "test_update::test_an_update_equals_the_reference[grpo-in several]",
    ),
    Bug(
        "the evaluation's seeds those of training",
        r"\bVALIDATION = 1\b",
        r"VALIDATION = 0",
        "test_no_two_samples_share_random_numbers",
    ),
    Bug(
        "world.size left out of the loss that goes backward",
        r"scale\(world\.size \* loss\)",
        r"scale(loss)",
        "test_an_update_on_several_ranks_equals_the_reference[2]",
    ),
    Bug(
        "sil's ties to the higher index",
        r"order = rewards\.argsort\(dim=1, descending=True, stable=True\)",
        r"order = rewards.shape[1] - 1 - "
        r"rewards.flip(1).argsort(dim=1, descending=True, stable=True)",
        "test_the_k_best_are_marked_and_ties_go_to_the_lower_index",
    ),
    Bug(
        "best/ replaced by an equal score",
        r"score > state\.best\b",
        r"score >= state.best",
        "test_sil_runs_and_of_equal_models_the_earliest_is_the_best",
    ),
    Bug(
        "the k-th of pass@k off by one",
        r"math\.comb\(n - c, k\) / math\.comb\(n, k\)",
        r"math.comb(n - c, k - 1) / math.comb(n, k - 1)",
        "test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample",
    ),
    Bug(
        "a reply of a tool trained",
        r"torch\.from_numpy\(~completion\.is_inserted\)",
        r"torch.ones(len(completion.token_ids)).bool()",
        "test_the_gradient_is_that_of_the_sampled_tokens_alone",
    ),
    Bug(
        "random numbers without training.seed",
        r"\(SeedWord\.TRAINING, config\.training\.seed, position\)",
        r"(SeedWord.TRAINING, position)",
        "test_no_two_samples_share_random_numbers",
    ),
    Bug(
        "the stream's position one too far",
        r"run\.end_step\(update, metrics, next_position\)",
        r"run.end_step(update, metrics, next_position + 1)",
        "test_no_two_samples_share_random_numbers",
    ),
    Bug(
        "no fsync of a saved folder's files",
        r"            sync\(path\)\n",
        r"            pass\n",
        "test_all_of_a_folder_is_on_the_disk_before_it_has_its_name",
    ),
    Bug(
        "the rest of a uniform not clamped",
        r"\(1 - share_left\[:, 0\]\)\.clamp\(0, 1\)",
        r"1 - share_left[:, 0]",
        "test_the_rest_of_a_uniform_is_a_uniform_again",
    ),
    Bug(
        "the cache not reordered",
        r"        self\.cache\.reorder_cache\(indices\)\n",
        r"",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "the optimizer's state not loaded",
        r"\n +run\.optimizer\.load_state_dict\(.*?\n",
        r"\n",
        "test_a_broken_run_goes_on_bit_for_bit[an exception]",
    ),
    Bug(
        "one checkpoint more kept",
        r"whole\[keep:\]",
        r"whole[keep + 1 :]",
        "test_checkpoints_are_kept_as_the_config_says_and_what_a_killed_save_left_goes",
    ),
    Bug(
        "dropout not seeded",
        r'clock\("update"\), seeded\(seeds, world\.device\)',
        r'clock("update")',
        "test_lora::test_a_run_in_two_parts_is_bit_for_bit_the_unbroken_one",
    ),
    Bug(
        "a KL penalty without the rows of advantage 0",
        r" or training\.has_reference\]",
        r"]",
        "test_update::test_an_update_equals_the_reference[kl-in several]",
    ),
    Bug(
        "advantages above 0 alone",
        r"t\.advantage != 0\.0",
        r"t.advantage > 0.0",
        "test_update::test_an_update_equals_the_reference[grpo-in several]",
    ),
    Bug(
        "the learning rate of the step before",
        r"set_learning_rate\(optimizer, run\.state\.step \+ 1, training\)",
        r"set_learning_rate(optimizer, run.state.step, training)",
        "test_optimizer::test_a_run_in_two_parts_is_the_unbroken_one",
    ),
    Bug(
        "an evaluation as long as training",
        r"max_new_tokens=run\.config\.max_validation_tokens",
        r"max_new_tokens=run.config.training.max_new_gen_tokens",
        "test_validation_has_its_own_length_and_a_greedy_one_samples_once",
    ),
    Bug(
        "a broken model taken for the best",
        r"is_best = not is_broken and ",
        r"is_best = ",
        "test_which_model_is_the_best",
    ),
    Bug(
        "a second Ctrl-C without effect",
        r"if number == signal\.SIGINT and self\.first and now_s",
        r"if False and now_s",
        "test_signals[a second Ctrl-C ends it]",
    ),
    Bug(
        "the weights' hash left out with a KL penalty",
        r"config\.model\.lora is not None or config\.training\.has_reference",
        r"config.model.lora is not None",
        "test_a_change_in_what_a_resumed_run_reads_of_its_model_is_seen",
    ),
    Bug(
        "the new tokens forgotten in the room for rows",
        r"fit // \(longest \+ params\.max_new_tokens\)",
        r"fit // longest",
        "test_a_batch_has_room_for_the_prompts_and_their_new_tokens",
    ),
    Bug(
        "a collapse ends a run that should go on",
        r"training\.stop_on_collapse and bool\(",
        r"bool(",
        "test_a_collapsed_run_goes_on_unless_the_config_says_to_stop",
    ),
    Bug(
        "answers collected that were cut off",
        r"if trajectory\.is_solved_and_ended\]",
        r"if trajectory.is_solved]",
        "test_an_answer_that_was_cut_off_is_not_collected",
    ),
    Bug(
        "a turn begins with the reply before it",
        r"self\.start = len\(token_ids\) \+ len\(reply_ids\)",
        r"self.start = len(token_ids)",
        "test_each_turn_has_the_models_words_alone_and_random_numbers_of_its_own",
    ),
    Bug(
        "an environment's dice without the turn",
        r"else \(\*self\.seed, self\.num_turns\)",
        r"else self.seed",
        "test_each_turn_has_the_models_words_alone_and_random_numbers_of_its_own",
    ),
    Bug(
        "the same training questions on each rank",
        r"taken\[world\.rank \* per_rank :\]\[:per_rank\]",
        r"taken[:per_rank]",
        "test_two_ranks_do_the_same_step_as_one",
    ),
    Bug(
        "the first validation questions on each rank",
        r"mine = run\.world\.share\(range\(len\(run\.validation_questions\)\)\)",
        r"mine = range(len(run.world.share(run.validation_questions)))",
        "test_the_ranks_take_turns_with_the_validation_questions",
    ),
    Bug(
        "the same random numbers in each rank's evaluation",
        r"\(SeedWord\.VALIDATION, i\) for i in mine",
        r"(SeedWord.VALIDATION, i) for i, _ in enumerate(mine)",
        "test_the_ranks_take_turns_with_the_validation_questions",
    ),
    Bug(
        "the log written by each rank",
        r"Logger\(rank=world\.rank, boards",
        r"Logger(rank=0, boards",
        "test_sharding::test_a_run_is_resumed_bit_for_bit_and_goes_on_with_another_number_of_ranks",
    ),
    Bug(
        "each rank's completions in rank 0's file",
        r"completions-\{run\.world\.rank\}",
        r"completions-0",
        "test_two_ranks_do_the_same_step_as_one",
    ),
    Bug(
        "each rank cuts all files of completions",
        r"run\.world\.share\(sorted\((.*?)\)\):",
        r"sorted(\1):",
        "test_each_rank_cuts_its_own_files",
    ),
    Bug(
        "the parts of a checkpoint written to one file",
        r"PART\.format\(world\.rank\)",
        r"PART.format(0)",
        "test_sharding::test_a_run_is_resumed_bit_for_bit_and_goes_on_with_another_number_of_ranks",
    ),
    Bug(
        "rank 0's part of a checkpoint on each rank",
        r"num_parts=num_parts, rank=world\.rank\)",
        r"num_parts=num_parts, rank=0)",
        "test_sharding::test_a_run_is_resumed_bit_for_bit_and_goes_on_with_another_number_of_ranks",
    ),
    Bug(
        "the first rows of a weight on each rank",
        r"start = min\(rank \* ",
        r"start = min(0 * ",
        "test_sharding::test_a_run_is_resumed_bit_for_bit_and_goes_on_with_another_number_of_ranks",
    ),
    Bug(
        "the same dropout on each rank that imitates",
        r"training\.seed, step, world\.rank\)",
        r"training.seed, step, 0)",
        "test_each_rank_imitates_its_own_share_of_the_shuffled_answers",
    ),
    Bug(
        "the first questions to each rank's answers",
        r"mine = world\.share\(questions\)",
        r"mine = questions[: len(groups)]",
        "test_a_lenient_reading_stands_beside_the_strict_one_where_the_task_has_one",
    ),
    Bug(
        "validation questions cut into one piece a rank",
        r"return items\[self\.rank :: self\.size\]",
        r"return items[self.rank * -(-len(items) // self.size) :][: -(-len(items) // self.size)]",
        "test_the_ranks_take_turns_with_the_validation_questions",
    ),
    Bug(
        "the first validation questions beside each rank's samples",
        r"run\.world\.share\(run\.validation_questions\)",
        r"run.validation_questions[: len(groups)]",
        "test_the_ranks_take_turns_with_the_validation_questions",
    ),
    Bug(
        "the KL's log-ratio limited above alone",
        r"\.clamp\(-KL_LOG_RATIO_LIMIT, KL_LOG_RATIO_LIMIT\)",
        r".clamp(max=KL_LOG_RATIO_LIMIT)",
        "test_the_kl_penalty_is_limited_on_both_sides",
    ),
    Bug(
        "the KL's log-ratio limited below alone",
        r"\.clamp\(-KL_LOG_RATIO_LIMIT, KL_LOG_RATIO_LIMIT\)",
        r".clamp(min=-KL_LOG_RATIO_LIMIT)",
        "test_the_kl_penalty_is_limited_on_both_sides",
    ),
    Bug(
        "the KL's log-ratio limited in the exponential alone",
        r"log_ratio\.expm1\(\) - log_ratio",
        r"log_ratio.expm1() - (ref_log_probs - log_probs)",
        "test_the_kl_penalty_is_limited_on_both_sides",
    ),
    Bug(
        "nothing mended after a kill between two renames",
        r"if old\.is_dir\(\) and not folder\.exists\(\):",
        r"if False:",
        "test_a_start_gives_what_a_kill_has_left_between_two_renames_its_name_back",
    ),
    Bug(
        "best/ not mended at a start",
        r'    mend\(folder / "best"\)\n',
        r"",
        "test_a_start_gives_what_a_kill_has_left_between_two_renames_its_name_back",
    ),
    Bug(
        "a checkpoint not mended at a start",
        r'mend\(old\.with_suffix\(""\)\)',
        r"pass",
        "test_a_start_gives_what_a_kill_has_left_between_two_renames_its_name_back",
    ),
    Bug(
        "metrics.jsonl moved aside first",
        r'key=lambda path: path\.name == "metrics\.jsonl"',
        r'key=lambda path: path.name != "metrics.jsonl"',
        "test_a_kill_while_a_killed_run_is_moved_aside_leaves_the_rest_to_the_next_start",
    ),
    Bug(
        "a column completion passed to reward functions",
        r'not in \("prompt", "completion"\)',
        r'not in ("prompt",)',
        "test_a_function_is_given_text_or_messages_as_the_rows_are",
    ),
    Bug(
        "MLflow's last evaluation sent again",
        r'f"\{step\} evaluated" if is_evaluation else str\(step\)',
        r"str(step)",
        "test_a_board_keeps_whether_the_last_evaluation_was_sent",
    ),
    Bug(
        "wandb's last evaluation sent again",
        r"\[step, is_evaluation\]",
        r"[step, False]",
        "test_a_board_keeps_whether_the_last_evaluation_was_sent",
    ),
    Bug(
        "a resumed wandb run refused",
        r'resume="allow"',
        r'resume="never"',
        "test_a_board_keeps_whether_the_last_evaluation_was_sent",
    ),
    Bug(
        "the tokenizer's end imitated, not the template's",
        r"tokenizer\.eos_token_id if end is None else end",
        r"tokenizer.eos_token_id",
        "test_an_answer_ends_where_the_chat_template_ends_a_turn",
    ),
    Bug(
        "answers imitated in the file's order",
        r"QuestionStream\(answers, training\.seed, True,",
        r"QuestionStream(answers, training.seed, False,",
        "test_each_rank_imitates_its_own_share_of_the_shuffled_answers",
    ),
    Bug(
        "the same answers imitated on each rank",
        r"in drawn\[world\.rank \* per_rank :\]\[:per_rank\]\]",
        r"in drawn[:per_rank]]",
        "test_each_rank_imitates_its_own_share_of_the_shuffled_answers",
    ),
    Bug(
        "the hub's repetition penalty not overwritten",
        r"        repetition_penalty=1\.0,\n",
        r"",
        "test_generation_config_sets_every_field_that_changes_the_distribution",
    ),
    Bug(
        "a model that samples with its dropout on",
        r"self\.loop\(self\.model\.eval\(\), ",
        r"self.loop(self.model, ",
        "test_dropout_acts_in_the_update_alone",
    ),
    Bug(
        "a step with broken rows trained on",
        r"if count_broken\(groups, run\.world, run\.logger\.warning\) > 0:  # on one",
        r"if False:  # on one",
        "test_a_model_that_goes_nan_ends_the_run_and_the_last_good_checkpoint_is_kept",
    ),
    Bug(
        "an update in eval mode",
        r"    policy\.model\.train\(\)",
        r"",
        "test_dropout_acts_in_the_update_alone",
    ),
    Bug(
        "a bool mask added to the scores",
        r"torch\.zeros_like\(mask, dtype=self\.dtype\)\[:, None, None\]\n        full = "
        r"full\.masked_fill\(~mask\[:, None, None\], torch\.finfo\(self\.dtype\)\.min\)",
        r"mask.to(self.dtype)[:, None, None]",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped, eager]",
    ),
    Bug(
        "random numbers by a question's place on its rank",
        r"for position, _ in mine\]",
        r"for position, _ in enumerate(mine)]",
        "test_no_two_samples_share_random_numbers",
    ),
    Bug(
        "the seed of a question's kind alone",
        r"default_rng\(list\(seed\)\)",
        r"default_rng(seed[0])",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "the last position asked for by a number",
        r"logits_to_keep=self\.last_column",
        r"logits_to_keep=1",
        "test_the_head_reads_rows_that_lie_together",
    ),
    Bug(
        "positions that stand still",
        r"        self\.positions \+= 1\n",
        r"",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "tokens scored where they stand",
        r"token_ids, is_scored = input_ids\[:, columns \+ 1\]",
        r"token_ids, is_scored = input_ids[:, columns]",
        "test_padded_and_batched_log_probs_equal_those_of_each_row_alone",
    ),
    Bug(
        "tokens counted after the end",
        r"self\.rows, self\.active\.long\(\)",
        r"self.rows, torch.ones_like(self.rows)",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "uniforms of other rows after some have left",
        r"self\.tokens, self\.uniforms = self\.tokens\[indices\], self\.uniforms\[indices\]",
        r"self.tokens, self.uniforms = self.tokens[indices], self.uniforms[: len(indices)]",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "completions in the order of lengths",
        r"for j, i in enumerate\(batch\):",
        r"for j, i in enumerate(sorted(batch)):",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "greedy tokens scored at temperature 0.01",
        r"if params\.temperature not in \(0, 1\):",
        r"if params.temperature != 1:",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "log-probabilities of what top-p has kept",
        r"log_probs = logits - log_sum\[:, None\]",
        r"log_probs = keep_likeliest(probs, params.top_p, params.top_k).log()",
        "test_a_draw_by_hand",
    ),
    Bug(
        "an index of a block too far",
        r"right=True\)\.clamp\(max=cdf\.shape\[1\] - 1\)",
        r"right=False).clamp(max=cdf.shape[1] - 1)",
        "test_a_draw_is_that_of_the_plain_formulas_in_double_precision",
    ),
    Bug(
        "equal rewards found by their deviation",
        r"is_equal = rewards\.amax\(dim=1\) == rewards\.amin\(dim=1\)",
        r"is_equal = rewards.std(dim=1) == 0",
        "test_equal_rewards_give_exactly_zero",
    ),
    Bug(
        "sil without groups of equals",
        r"advantages = in_batch\.double\(\)",
        r"in_batch &= rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)\n "
        r"       advantages = in_batch.double()",
        "test_update::test_an_update_equals_the_reference[sil-in several]",
    ),
    Bug(
        "a mean over the batch, not the group",
        r"rewards - rewards\.mean\(dim=1, keepdim=True\)\n    if divide",
        r"rewards - rewards.mean()\n    if divide",
        "test_the_advantages_are_those_of_trl[none-False]",
    ),
    Bug(
        "the clip on the wrong side",
        r"\.minimum\(clipped \* advantages\)",
        r".maximum(clipped * advantages)",
        "test_trl_numbers::test_loss_and_gradient_are_those_of_trl[dapo]",
    ),
    Bug(
        "a ratio without a gradient",
        r"ratio = \(log_probs - old_log_probs\)\.exp\(\)",
        r"ratio = (log_probs - old_log_probs).exp().detach()",
        "test_trl_numbers::test_loss_and_gradient_are_those_of_trl[dapo]",
    ),
    Bug(
        "GSPO's mean over the padding too",
        r"means = \(log_probs \* completion_mask\)\.sum\(dim=1, keepdim=True\) / "
        r"lengths\.clamp\(min=1\)",
        r"means = (log_probs * completion_mask).mean(dim=1, keepdim=True)",
        "test_trl_numbers::test_loss_and_gradient_are_those_of_trl[gspo]",
    ),
    Bug(
        "rows without an advantage counted as clipped",
        r"\(too_high & \(advantages > 0\)\) \| \(too_low & \(advantages < 0\)\)",
        r"too_high | too_low",
        "test_the_share_of_clipped_tokens_is_that_of_trl",
    ),
    Bug(
        "an optimizer step without a lesson",
        r"    if num_trained == 0:\n        return \[\]\n",
        r"",
        "test_no_advantage_means_no_optimizer_step",
    ),
    Bug(
        "the row of an idle rank weighs as any other",
        r"batch\[:1\], torch\.inf, torch\.inf",
        r"batch[:1], num_rows, num_tokens",
        "test_an_update_on_several_ranks_equals_the_reference[3]",
    ),
    Bug(
        "a shard's added pass weighs as the first",
        r"replace\(first, trajectories=\[\], token_weights=weights\)",
        r"replace(first, trajectories=[])",
        "test_a_pass_that_a_shard_adds_has_no_completions",
    ),
    Bug(
        "gradients held twice",
        r"zero_grad\(set_to_none=not policy\.is_in_ddp\)",
        r"zero_grad(set_to_none=True)",
        "test_ddp_holds_gradients_once_in_its_buckets",
    ),
    Bug(
        "all logits kept for the backward pass",
        r"num_kept = min\(len\(weight\), .*\)\n",
        r"num_kept = len(weight)\n",
        "test_it_never_holds_all_logits",
    ),
    Bug(
        "the head's gradient without the temperature",
        r"slope = grad_log_probs / ctx\.temperature",
        r"slope = grad_log_probs",
        "test_it_is_log_softmax_for_any_loss",
    ),
    Bug(
        "the sampler's copy not refreshed after an update",
        r"    policy\.sampler\.refresh\(\).*\n    update\.metrics",
        r"    update.metrics",
        "test_the_copy_that_samples_has_the_weights_of_each_update",
    ),
    Bug(
        "truncated rows out of the counts too",
        r"kept = \[t for t in batch if not \(training\.skip",
        r"batch = kept = [t for t in batch if not (training.skip",
        "test_update::test_an_update_equals_the_reference[skip-in several]",
    ),
    Bug(
        "the decay begun one step early",
        r"progress = \(step - 1 - num_warmup\)",
        r"progress = (step - num_warmup)",
        "test_after_the_warm_up_each_rate_is_that_of_transformers_one_step_earlier",
    ),
    Bug(
        "weight decay on vectors too",
        r'"params": \[p for p in others if p\.ndim < 2\], "weight_decay": 0\.0',
        r'"params": [p for p in others if p.ndim < 2], "weight_decay": decay',
        "test_weight_decay_is_on_all_but_the_vectors",
    ),
    Bug(
        "one rate for all groups",
        r'group\["lr"\] = rate \* group\["lr_scale"\]',
        r'group["lr"] = rate',
        "test_muon_steps_the_blocks_matrices_and_adamw_the_rest_each_at_its_rate",
    ),
    Bug(
        "the old folder removed before the new one has its name",
        r"        folder\.rename\(old\)\n",
        r"        remove(folder)\n",
        "test_a_kill_at_any_file_event_of_a_step_costs_no_more_than_that_step",
    ),
    Bug(
        "what a killed save left kept for ever",
        r"in \[\*outdated, \*left_by_kills\]:",
        r"in outdated:",
        "test_checkpoints_are_kept_as_the_config_says_and_what_a_killed_save_left_goes",
    ),
    Bug(
        "a checkpoint whole though a file was cut",
        r"saved\.items\(\) <= sizes_of\(folder\)\.items\(\)",
        r"saved.keys() <= sizes_of(folder).keys()",
        "test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
    ),
    Bug(
        "an optimizer's file that may run code",
        r"weights_only=True\)",
        r"weights_only=False)",
        "test_an_optimizer_that_holds_code_or_was_damaged_is_one_line_and_runs_nothing",
    ),
    Bug(
        "a lock that two runs can hold",
        r"fcntl\.LOCK_EX \| fcntl\.LOCK_NB",
        r"fcntl.LOCK_SH | fcntl.LOCK_NB",
        "test_a_second_start_of_a_run_is_refused_while_the_first_lasts",
    ),
    Bug(
        "deleted checkpoints forgotten",
        r"\(folder / MARKER\)\.exists\(\) or list_checkpoints\(root\)",
        r"list_checkpoints(root)",
        "test_a_run_that_cannot_go_on_is_refused_in_a_line_and_nothing_is_lost[no checkpoint]",
    ),
    Bug(
        "a checkpoint's attention in the place of the run's",
        r"\(folder, config=model\.config, dtype=model\.dtype\)",
        r"(folder, dtype=model.dtype)",
        "test_a_checkpoint_is_loaded_with_the_attention_of_the_run",
    ),
    Bug(
        "large weights hashed at their beginning alone",
        r"for start in range\(0, size, stride\):",
        r"for start in range(0, min(size, 1), stride):",
        "test_large_weights_are_sampled_all_over",
    ),
    Bug(
        "questions in another order taken for the same",
        r"        for question in questions:\n            digest",
        r"        for question in sorted(questions, key=str):\n            digest",
        "test_other_questions_or_another_order_are_seen_and_what_json_cannot_hold_is_left_out",
    ),
    Bug(
        "a run resumed at the day of its restart",
        r'config\.task\.template_date or str\(task\.get\("template_date"\) or '
        r"date\.today\(\)\)",
        r"config.task.template_date or str(date.today())",
        "test_a_run_keeps_the_day_of_its_first_start",
    ),
    Bug(
        "a run without its best model ends well",
        r"return 1 if run\.unsaved or not run\.state\.has_trained else 0",
        r"return 0",
        "test_a_run_whose_best_model_was_lost_ends_with_1",
    ),
    Bug(
        "a dead pipe that ends the run",
        r"\(errno\.EIO, errno\.EPIPE\)",
        r"(errno.EIO,)",
        "test_what_is_written_into_a_dead_pipe_goes_nowhere",
    ),
    Bug(
        "a task's exit taken for the run's end",
        r'    except SystemExit as error:\n        problem = f"the task called',
        r'    except ZeroDivisionError as error:\n        problem = f"the task called',
        "test_a_crash_names_its_fix[exit]",
    ),
    Bug(
        "a broken row with a finite log-probability",
        r"chosen = log_probs\.gather\(-1, tokens\[:, None\]\)\[:, 0\]",
        r"chosen = log_probs.gather(-1, tokens[:, None])[:, 0].nan_to_num()",
        "test_a_row_of_broken_logits_gets_a_log_probability_of_nan_and_harms_no_other",
    ),
    Bug(
        "MLflow's own retries",
        r'"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"',
        r'"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "7"',
        "test_the_default_limits_bound_a_request_to_half_a_minute",
    ),
    Bug(
        "a board that has failed called again",
        r"            self\.is_on = False\n            reason",
        r"            reason",
        "test_a_board_that_has_failed_or_is_slow_is_not_called_again",
    ),
    Bug(
        "a resumed run doubles the last step's evaluation",
        r"moment_of\(row\) <= \(resume_step, is_evaluated\)",
        r'row["step"] <= resume_step',
        "test_an_evaluation_stays_if_the_checkpoint_knows_it",
    ),
    Bug(
        "a new run continues the old one's boards",
        r"                file\.unlink\(\)\n",
        r"                pass\n",
        "test_a_new_run_starts_its_files_anew",
    ),
    Bug(
        "a window of ten steps however few questions",
        r"max\(MIN_STEPS, math\.ceil\(MIN_QUESTIONS / num_questions\)\)",
        r"MIN_STEPS",
        "test_means_are_over_ten_steps_or_160_questions_whichever_is_more",
    ),
    Bug(
        "a sign of a collapse reported at each step",
        r"            if name not in before:\n",
        r"            if True:\n",
        "test_a_sign_is_reported_once_while_it_lasts",
    ),
    Bug(
        "entropy over a tool's tokens too",
        r"\.sum\(\)\) for t in sampled\), num_drawn\)",
        r".sum()) for t in sampled), num_tokens)",
        "test_entropy_is_a_mean_over_sampled_tokens_and_length_counts_all",
    ),
    Bug(
        "an evaluation with broken logits ends well",
        r"return 2 if count_broken\(",
        r"return 0 if count_broken(",
        "test_an_evaluation_of_a_model_whose_logits_are_nan_says_so_and_fails",
    ),
    Bug(
        "the card's scores of before training",
        r"before=run\.state\.untrained,",
        r"before=[measured[key] for key in PASS_AT_1],",
        "test_the_text_has_scores_beside_those_without_training_and_the_settings_of_the_recipe",
    ),
    Bug(
        "a card with a path of this machine",
        r"datasets=\[source\] if is_on_hub\(source\) else None",
        r"datasets=[source]",
        "test_a_base_and_data_that_are_no_hub_ids_are_in_the_text_alone",
    ),
    Bug(
        "a file's key comes before the command line's",
        r"merge\(without_other_task\(from_file, from_command_line\), from_command_line\)",
        r"merge(from_command_line, without_other_task(from_file, from_command_line))",
        "test_what_is_given_is_read_and_reads_the_same_once_it_is_written[the command line wins]",
    ),
    Bug(
        "tiny's learning rate for any model",
        r"        check_default_rate\(config\)\n",
        r"        pass\n",
        "test_tinys_learning_rate_is_refused_for_other_models",
    ),
    Bug(
        "an evaluation into a folder of its own",
        r"for folder in end\.parents\[:2\]\)",
        r"for folder in end.parents[:1])",
        "test_a_runs_own_models_are_evaluated_into_its_folder",
    ),
    Bug(
        "any method called as a tool",
        r"if name not in self\.turns\.names:",
        r"if not hasattr(self.environment, name):",
        "test_what_is_wrong_with_a_call_is_told_to_the_model",
    ),
    Bug(
        "one turn more than max_turns",
        r"self\.num_turns >= self\.max_turns",
        r"self.num_turns > self.max_turns",
        "test_a_turn_is_the_last_after_max_turns_or_with_another_end",
    ),
    Bug(
        "a tool's token asks the tool",
        r"asks = self\.active & is_drawn & ",
        r"asks = self.active & ",
        "test_three_turns_by_hand_their_ids_and_which_of_them_are_trained",
    ),
    Bug(
        "an inserted end token ends the row",
        r"!= self\.end_ids\)\.all\(dim=1\) \| ~is_drawn",
        r"!= self.end_ids).all(dim=1)",
        "test_an_end_token_that_is_inserted_ends_nothing",
    ),
    Bug(
        "the first expression calculated, not the last",
        r"text\.rpartition\(self\.opening\)",
        r"text.partition(self.opening)",
        "test_the_last_expression_is_calculated_and_what_cannot_be_is_left_to_the_model",
    ),
    Bug(
        "an upload for everybody to see",
        r"private=not asked\.public",
        r"private=asked.public",
        "test_a_new_repository_is_private_unless_it_is_to_be_public",
    ),
    Bug(
        "a page of another site answered",
        r'origin in \(None, f"http://\{host\}"\)',
        r"True",
        "test_only_a_page_of_this_server_is_answered",
    ),
    Bug(
        "any folder's model loaded by the page",
        r"if name not in models\(options\.folder\) or not",
        r"if not",
        "test_what_cannot_be_answered_is_one_line",
    ),
    Bug(
        "a model's text ends the page's script",
        r'\.replace\("<", "\\\\u003c"\)',
        r"",
        "test_no_text_can_leave_its_place_in_the_page",
    ),
    Bug(
        "a found config that chooses any key",
        r"for key in keys or found if key in found\}",
        r"for key in found}",
        "test_a_config_that_was_found_has_no_code_run",
    ),
    Bug(
        "a kernel of a found config loaded",
        r'        del kept\["model"\]\["attn_implementation"\]\n',
        r"        pass\n",
        "test_a_config_that_was_found_has_no_code_run",
    ),
    Bug(
        "a band of the last seed",
        r"stacked\[:, 2\]\.max\(axis=0\)",
        r"stacked[-1, 2]",
        "test_curves_by_hand",
    ),
    Bug(
        "code that a grader runs not seen",
        r'\("exec", "os\.system", "subprocess\.Popen"\)',
        r'("os.system", "subprocess.Popen")',
        "test_each_kind_is_found_in_a_naive_grader",
    ),
    Bug(
        "a token's weight in rollouts.jsonl that of the padding",
        r"batch\.token_weights\.amax\(dim=1\)",
        r"batch.token_weights.amin(dim=1)",
        "test_a_line_holds_the_groups_completions_best_first",
    ),
    # Configurations, processes, files, models, questions and tasks
    Bug(
        "a difference of three from the right",
        r"min_precedence=PRECEDENCE\[token\]",
        r"min_precedence=PRECEDENCE[token] + 1",
        "test_a_result_is_exact_and_short_or_there_is_none",
    ),
    Bug(
        "a calculator's result rounded",
        r"scaled = (value_of\(.+\)) \* 10\*\*MAX_DECIMALS",
        r"scaled = Fraction(round(\1 * 10**MAX_DECIMALS))",
        "test_a_result_is_exact_and_short_or_there_is_none",
    ),
    Bug(
        "runs of two seeds in one folder",
        r"-s\{config\.training\.seed\}",
        r"",
        "test_what_is_given_is_read_and_reads_the_same_once_it_is_written[a run]",
    ),
    Bug(
        "a key that an older run lacks",
        r"dotted_values\(type\(config\)\(\)\) \| saved",
        r"saved",
        "test_a_run_of_before_a_key_was_there_had_its_default",
    ),
    Bug(
        "a resumed run at another learning rate",
        r'FREE_SECTIONS = \("checkpoint\.",',
        r'FREE_SECTIONS = ("checkpoint.", "training.",',
        "test_a_run_goes_on_with_other_keys_than_those_that_shape_what_it_learns",
    ),
    Bug(
        "epochs rounded to the nearest step",
        r"int\(num_epochs \* num_questions",
        r"round(num_epochs * num_questions",
        "test_epochs_become_steps_rounded_down",
    ),
    Bug(
        "a signal to another rank not heeded",
        r"bool\(self\.sum\(\[self\.stop_signal > 0\]\) > 0\)",
        r"self.stop_signal > 0",
        "test_all_ranks_learn_of_a_signal_to_one_and_of_a_mistake_of_rank_0",
    ),
    Bug(
        "sums over ranks in float32",
        r"torch\.as_tensor\(values, dtype=torch\.float64",
        r"torch.as_tensor(values, dtype=torch.float32",
        "test_sums_over_ranks_are_exact_in_float64_and_leave_the_caller_its_values",
    ),
    Bug(
        "a table's rows from the ranks one after the other",
        r"table\[self\.rank :: self\.size\]",
        r"table[self.rank * len(mine) : (self.rank + 1) * len(mine)]",
        "test_votes_and_greedy_answers_by_hand",
    ),
    Bug(
        "rank 0's mistake unknown to the others",
        r"if problem is not None:",
        r"if problem is not None and self.is_main:",
        "test_all_ranks_learn_of_a_signal_to_one_and_of_a_mistake_of_rank_0",
    ),
    Bug(
        "gradients beside DDP's buckets",
        r"set_to_none=not is_ordered",
        r"set_to_none=True",
        "test_ddp_holds_gradients_once_in_its_buckets",
    ),
    Bug(
        "the order of DDP's buckets left to the first step",
        r"for is_ordered in \(False, True\)",
        r"for is_ordered in ()",
        "test_ddp_holds_gradients_once_in_its_buckets",
    ),
    Bug(
        "a file written over the old one",
        r"    append_durably\(temporary, text\)\n    temporary\.replace\(path\)",
        r"    path.write_text(text)",
        "test_a_file_is_whole_on_the_disk_before_it_takes_the_old_ones_place",
    ),
    Bug(
        "a link followed to somebody's file",
        r" \| os\.O_NOFOLLOW",
        r"",
        "test_a_file_behind_a_link_is_never_written",
    ),
    Bug(
        "NaN in a line of JSON",
        r"parse_constant=lambda name: None",
        r"parse_constant=float",
        "test_any_text_survives_in_a_sample_and_a_number_that_is_not_finite_is_null",
    ),
    Bug(
        "a line read that is being written",
        r'read_text\(path\)\.split\("\\n"\)\[:-1\]',
        r'read_text(path).split("\\n")',
        "test_a_resumed_run_has_neither_a_gap_nor_a_doubled_step",
    ),
    Bug(
        "a hub out of reach asked for every file",
        r"huggingface_hub\.constants\.HF_HUB_OFFLINE = True\n",
        r"pass\n",
        "test_a_hub_out_of_reach_is_asked_once",
    ),
    Bug(
        "a long text without its end",
        r"text\[-\(max_characters // 3\) :\]",
        r"text[: max_characters // 3]",
        "test_an_error_is_one_printable_line",
    ),
    Bug(
        "a control code printed",
        r'c in "\\n\\t"',
        r'c in "\\n\\t\\x1b"',
        "test_printing_never_raises_and_never_obeys_control_codes",
    ),
    Bug(
        "a learning rate of 1E-5 a text",
        r"\[eE\](\[-\+\]\?\[0-9\]\+\$)",
        r"[e]\1",
        "test_what_is_given_is_read_and_reads_the_same_once_it_is_written[1E-5]",
    ),
    Bug(
        "samples resampled in place of questions",
        r"confidence_interval\(solved\.mean\(axis=1\),",
        r"confidence_interval(solved.ravel(),",
        "test_the_units_of_the_interval_are_questions_not_samples",
    ),
    Bug(
        "a tied vote to the last",
        r"statistics\.mode\(given\)",
        r"statistics.mode(given[::-1])",
        "test_the_majority_is_the_earliest_sample_with_the_most_frequent_answer",
    ),
    Bug(
        "a clock that shows the last time alone",
        r"self\.seconds\.get\(phase, 0\.0\) \+ ",
        r"",
        "test_a_clock_adds_up_a_phase_and_starts_anew_when_it_is_read",
    ),
    Bug(
        "positions that count padding",
        r"mask\.long\(\)\.cumsum",
        r"torch.ones_like(mask).cumsum",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-grouped]",
    ),
    Bug(
        "top-p of all though top-k has cut some",
        r"top_p \* ordered\.sum\(dim=-1, keepdim=True\)",
        r"top_p",
        "test_truncated_sampling_draws_from_what_transformers_keeps",
    ),
    Bug(
        "random's state not put back",
        r"random\.setstate\(states\[0\]\)",
        r"pass",
        "test_all_backends_play_the_same_in_every_batch",
    ),
    Bug(
        "a pip command without the version",
        r"pip install \{quote\(pin\)\}",
        r"pip install {pin.partition('=')[0]}",
        "test_a_missing_package_is_named_with_what_installs_it",
    ),
    Bug(
        "a completion broken only where all of it is",
        r"isfinite\(self\.log_probs\)\.all\(\)",
        r"isfinite(self.log_probs).any()",
        "test_a_completion_of_nan_log_probabilities_is_broken_and_not_solved",
    ),
    Bug(
        "solved by the first part of the reward",
        r'parts = \{"answer": self\.reward_parts\.get\("answer"\)\} \| self\.reward_parts',
        r"parts = self.reward_parts",
        "test_solved_is_the_answer_else_the_first_function",
    ),
    Bug(
        "GPT-2's dropout left on",
        r' or key\.endswith\("pdrop"\)',
        r"",
        "test_the_dropout_in_a_folders_config_is_off",
    ),
    Bug(
        "weights in the dtype of their files",
        r"(config=model_config,\s+)dtype=dtype",
        r'\1dtype="auto"',
        "test_weights_and_adamw_moments_are_fp32_though_the_folder_holds_bf16",
    ),
    Bug(
        "the hub's temperature and penalty kept",
        r"model\.generation_config = GenerationConfig\(",
        r"model.generation_config.update(",
        "test_what_is_drawn_is_what_one_plain_forward_pass_gives[rotary-generate]",
    ),
    Bug(
        "missing weights drawn at random",
        r'sorted\(loading\["missing_keys"\]\)',
        r"[]",
        "test_a_model_that_misfits_its_config_is_refused",
    ),
    Bug(
        "the host's whole memory to each process",
        r'os\.sysconf\("SC_PHYS_PAGES"\) / num_processes',
        r'os.sysconf("SC_PHYS_PAGES")',
        "test_the_host_must_hold_the_model_once_for_each_process",
    ),
    Bug(
        "an adapter the same for every seed",
        r"torch\.manual_seed\(seed\)",
        r"torch.manual_seed(0)",
        "test_the_adapter_starts_from_the_seed_and_changes_nothing",
    ),
    Bug(
        "an adapter's base at a relative path",
        r"os\.path\.abspath\(model\.name_or_path\)",
        r"model.name_or_path",
        "test_best_loads_from_anywhere",
    ),
    Bug(
        "the adapter off after an error",
        r"    finally:\n( +)self\.model\.enable_adapters\(\)",
        r"    except ZeroDivisionError:\n\1scorer.model.enable_adapters()",
        "test_an_error_leaves_the_adapter_on",
    ),
    Bug(
        "an adapter's inputs cast to fp32",
        r"cast_input_dtype_enabled = False",
        r"cast_input_dtype_enabled = True",
        "test_inputs_of_an_adapter_are_not_cast_to_fp32_and_back",
    ),
    Bug(
        "rotary frequencies in bf16",
        r"copy\.deepcopy\(model, copies\)\.to\(device\)",
        r"copy.deepcopy(model, copies).to(device, dtype)",
        "test_the_bf16_sampler_keeps_its_rotary_frequencies",
    ),
    Bug(
        "a sampler that keeps its weights",
        r"copied\.copy_\(whole\(weights, copied\.dtype\)\)",
        r"whole(weights, copied.dtype)",
        "test_the_copy_that_samples_has_the_weights_of_each_update",
    ),
    Bug(
        "a reference that is the policy",
        r"return copy_in\(self\.compute_dtype, self\.model, self\.model\.device\)",
        r"return self.model",
        "test_update::test_an_update_equals_the_reference[kl-in several]",
    ),
    Bug(
        "a probe of the row without padding alone",
        r"for row in \(0, 2\)",
        r"for row in (0,)",
        "test_the_probe_sees_a_mask_that_is_added_instead_of_applied",
    ),
    Bug(
        "capped logits taken for a plain head",
        r"1e-6 \* expected\.abs\(\)\.max\(\)",
        r"2**-6 * expected.abs().max()",
        "test_capped_logits_are_scored_by_the_plain_path_and_that_is_logged",
    ),
    Bug(
        "float16 for logits that are NaN",
        r"bool\(difference <= 2\*\*-6 \*",
        r"not bool(difference > 2**-6 *",
        "test_auto_takes_float16_only_where_numbers_stay_within",
    ),
    Bug(
        "another tokenizer than the folder's",
        r"if ids != expected\.ids",
        r"if not ids and expected.ids",
        "test_tokens_are_those_of_tokenizer_json",
    ),
    Bug(
        "the chat template's end of a turn left out",
        r", end_of_turn\(tokenizer\)\]",
        r"]",
        "test_a_completion_ends_where_the_chat_template_ends_a_turn",
    ),
    Bug(
        "a chat template with today's date",
        r"template = TODAY\.sub\(.*, (tokenizer\.get_chat_template\(\))\)",
        r"template = \1",
        "test_a_template_that_writes_the_date_writes_the_one_that_the_run_began_on",
    ),
    Bug(
        "a token one beyond the embeddings",
        r"largest >= num_embeddings",
        r"largest > num_embeddings",
        "test_a_mistake_in_a_models_folder_is_one_line_with_its_fix[a token]",
    ),
    Bug(
        "every epoch in the same order",
        r"default_rng\(\[SeedWord\.ORDER, self\.seed, epoch\]\)",
        r"default_rng([SeedWord.ORDER, self.seed])",
        "test_the_question_stream_is_one_seeded_permutation_after_the_other",
    ),
    Bug(
        "training on validation questions that are spelled otherwise",
        r"if task\.question_key\(row\) not in excluded\]",
        r"if row not in exclude]",
        "test_excluded_questions_are_left_out_however_they_are_spelled",
    ),
    Bug(
        "other validation questions for each seed",
        r"num_examples=num, seed=0,",
        r"num_examples=num, seed=config.training.seed,",
        "test_the_validation_questions_are_the_same_for_every_seed_and_mode",
    ),
    Bug(
        "no room left for the completion",
        r" - config\.max_validation_tokens\b",
        r"",
        "test_a_question_may_leave_exactly_the_room_that_a_completion_needs",
    ),
    Bug(
        "columns that a reward function may change",
        r"function\(\*\*copy\.deepcopy\(columns\), ",
        r"function(**columns, ",
        "test_a_function_is_given_text_or_messages_as_the_rows_are",
    ),
    Bug(
        "NaN as a reward",
        r"abs\(value\) <= MAX_REWARD",
        r"not abs(value) > MAX_REWARD",
        "test_a_mistake_in_a_reward_function_is_one_line_with_file_and_line[nan]",
    ),
    Bug(
        "special tokens added to a template's text",
        r"return texts, not is_chat",
        r"return texts, True",
        "test_of_special_tokens_only_a_beginning_is_added_and_only_without_a_template",
    ),
    Bug(
        "the assistant's beginning closed by the template",
        r"return text \+ \(prefix\.replace",
        r"return apply_template(messages, tokenizer, tools) or (prefix.replace",
        "test_a_chat_template_renders_the_chat_and_leaves_the_assistants_beginning_open",
    ),
    Bug(
        "a completion that was cut off without its last token",
        r"has_end = not \(completion\.truncated or ",
        r"has_end = not (",
        "test_a_completion_that_is_cut_off_keeps_its_last_token",
    ),
    Bug(
        "training on validation questions",
        r'is_held_out == \(split == "validation"\)',
        r'is_held_out or split == "train"',
        "test_train_and_validation_never_overlap_whatever_seed_order_and_size",
    ),
    Bug(
        "a question that its reward may change",
        r"question = copy\.deepcopy\(example\)(\s+with)",
        r"question = example\1",
        "test_it_keeps_what_it_sampled_and_what_the_update_made",
    ),
    Bug(
        "a measurement paid as a part of the reward",
        r"weights\.get\(part, 0\.0\)",
        r"weights.get(part, 1.0)",
        "test_a_time_out_is_counted_and_earns_nothing",
    ),
    Bug(
        "38 + 47 another question than 47 + 38",
        r'sorted\(\(example\["a"\], example\["b"\]\)\)',
        r'[example["a"], example["b"]]',
        "test_train_and_validation_never_overlap_whatever_seed_order_and_size",
    ),
    Bug(
        "one entry of a set equal to two",
        r"left\.remove\(match\)",
        r"pass",
        "test_each_answer_is_paid_or_not_as_the_tables_say[math500]",
    ),
    Bug(
        "an interval's brackets ignored",
        r"if kind != other_kind or ",
        r"if ",
        "test_each_answer_is_paid_or_not_as_the_tables_say[math500]",
    ),
    Bug(
        "the first box graded",
        r"completion\.rfind\(BOX, 0, end\)",
        r"completion.find(BOX, 0, end)",
        "test_each_answer_is_paid_or_not_as_the_tables_say[math500]",
    ),
    Bug(
        "a worker's late reply taken for the next one's",
        r'case \{"id": self\.last_id, "reply": reply\}',
        r'case {"reply": reply}',
        "test_a_worker_that_talks_nonsense_is_replaced",
    ),
    Bug(
        "time lost to a grader that is forgotten at the next",
        r"max\(asked_at, self\.forgiven_at\) \+ lost_s",
        r"asked_at + lost_s",
        "test_a_second_lost_is_forgiven_after_ten",
    ),
    Bug(
        "a worker's start counted as the answer's time",
        r"self\.startup_s \+= time\.monotonic\(\) - waiting_since",
        r"pass",
        "test_the_time_in_which_a_worker_starts_is_no_time_of_the_question",
    ),
    Bug(
        "a worker that hangs asked again",
        r"self\.start\(\)(  # so that another)",
        r"pass\1",
        "test_a_hanging_worker_is_killed_counted_once_and_replaced",
    ),
    Bug(
        "85 read in 85/1",
        r"\{NOT_CHANGED\}\{NOT_CONTINUED\}",
        r"{NOT_CHANGED}",
        "test_each_answer_is_paid_or_not_as_the_tables_say[arithmetic]",
    ),
    Bug(
        "capitals that commute",
        r"\[A-Z\]\{3,\}",
        r"[A-Z]{99,}",
        "test_each_answer_is_paid_or_not_as_the_tables_say[math500]",
    ),
    Bug(
        "an equation that is not solved paid",
        r"if sign and is_solved and not any\(",
        r"if False and not any(",
        "test_each_answer_is_paid_or_not_as_the_tables_say[math500]",
    ),
    Bug(
        "ten thousands of another script read as ones",
        r"\n    \| \[\^\\W\\d_\\x00-\\u024f\][^\n]*",
        r"",
        "test_each_answer_is_paid_or_not_as_the_tables_say[gsm8k]",
    ),
    Bug(
        "5 hours and 30 minutes read as 5",
        r"None if OTHER\.search\(.*?\) else normal_form\(match\)",
        r"normal_form(match)",
        "test_each_answer_is_paid_or_not_as_the_tables_say[gsm8k]",
    ),
    Bug(
        "1,800 other than 1800",
        r're\.sub\("\[\{,\}\]", "", match\["number"\]\)',
        r'match["number"]',
        "test_each_answer_is_paid_or_not_as_the_tables_say[gsm8k]",
    ),
    Bug(
        "a completion of the allowed length punished",
        r"num_tokens > options\.max_tokens",
        r"num_tokens >= options.max_tokens",
        "test_plain_pays_for_the_answer_alone_and_too_many_tokens_cost_something",
    ),
    Bug(
        "every mark of a long text tried",
        r"islice\((re\.finditer\(.*?, text\)), MAX_MARKS\)",
        r"\1",
        "test_each_answer_is_paid_or_not_as_the_tables_say[gsm8k]",
    ),
    Bug(
        "the first number of a turn the guess",
        r"or \[0\]\)\[-1\]",
        r"or [0])[0]",
        "test_nothing_is_paid_for_lists_repetitions_or_numbers_outside",
    ),
    Bug(
        "a guess that stays in the range",
        r"max\(self\.low, guess \+ 1\)",
        r"max(self.low, guess)",
        "test_it_says_higher_or_lower_and_what_is_left",
    ),
    Bug(
        "a time-out paid",
        r"is_right is True",
        r"is_right is not False",
        "test_a_time_out_is_counted_and_earns_nothing",
    ),
    Bug(
        "problems that differ in a sign taken for one",
        r'char\.isalnum\(\) or char in "[^"]*"',
        r"char.isalnum()",
        "test_each_answer_is_paid_or_not_as_the_tables_say[math500]",
    ),
    Bug(
        "a puzzle whose scorer runs code",
        r"if options\.dataset not in REFUSED",
        r"if options.dataset not in ('countdown', 'puzzle24')",
        "test_a_puzzle_whose_scorer_runs_code_is_not_even_asked_for",
    ),
    Bug(
        "a puzzle half right taken for solved",
        r"score >= 0\.999",
        r"score > 0.5",
        "test_a_puzzle_is_solved_by_a_full_score_of_the_last_answer_alone",
    ),
    Bug(
        "a puzzle's first answer block scored",
        r'\.rpartition\("<answer>"\)\[2\]',
        r'.partition("<answer>")[2]',
        "test_a_puzzle_is_solved_by_a_full_score_of_the_last_answer_alone",
    ),
    Bug(
        "a number used twice",
        r"sorted\(numbers\) == sorted\(nums\)",
        r"set(numbers) == set(nums)",
        "test_each_answer_is_paid_or_not_as_the_tables_say[countdown]",
    ),
    Bug(
        "an answer run as code",
        r"value_of\(tokens\) == target",
        r'eval("".join(tokens)) == target',
        "test_each_answer_is_paid_or_not_as_the_tables_say[countdown]",
    ),
    Bug(
        "the last answer block graded",
        r'completion\.partition\("<answer>"\)',
        r'completion.rpartition("<answer>")',
        "test_each_answer_is_paid_or_not_as_the_tables_say[countdown]",
    ),
    Bug(
        "a lazy regex over unclosed tags",
        r'    _, opening, rest = completion\.partition\("<answer>"\)\n',
        r"    if not re.search('<answer>.*?</answer>', completion, re.DOTALL):\n"
        r"        return None\n\g<0>",
        "test_a_million_characters_of_garbage_take_less_than_100_ms[countdown]",
    ),
    Bug(
        "questions drawn by a hash that differs in each process",
        r'random\.Random\(f"countdown \{split\} \{seed\}"\)',
        r"random.Random(hash((split, seed)))",
        "test_questions::test_generated_questions_depend_on_the_seed_alone",
    ),
    Bug(
        "the tokens that skip_truncated leaves out in the divisor",
        r"num_sampled for t in kept\)",
        r"num_sampled for t in batch)",
        "test_update::test_an_update_equals_the_reference[skip, token-in several]",
    ),
    Bug(
        "an advantage of one's own not taken",
        r"return own_advantages\(name, rewards, groups\)",
        r"return advantages",
        "test_leave_one_out_is_the_means_advantage_times_g_over_g_minus_1",
    ),
    Bug(
        "a forked child that no signal ends",
        r"after_in_child=give_signals_back",
        r"after_in_child=release_signals",
        "test_signals[a forked child is terminated]",
    ),
    Bug(
        "an environment that does not hear the turn that a stop text ends",
        r"if hasattr\(self\.tool, \"environment\"\):",
        r"if False:",
        "test_a_turn_is_the_last_after_max_turns_or_with_another_end[a stop text]",
    ),
    Bug(
        "a stop text that only one token can spell",
        r"self\.most_tokens = 1 \+ max",
        r"self.most_tokens = 1 + 0 * max",
        "test_a_completion_is_what_it_would_be_up_to_the_token_that_completes_a_stop_text",
    ),
    Bug(
        "pass@1 chooses the best by a graded reward",
        r'"pass@1" if knows_right else "reward"',
        r'"pass@1"',
        "test_the_reward_chooses_the_best_model_where_no_function_says_what_is_right",
    ),
    Bug(
        "a call that is late paid in full",
        r"\[None\] \* len\(of_question\) if is_late",
        r"[1.0] * len(of_question) if is_late",
        "test_async_functions_wait_together_and_one_that_is_late_does_not_apply",
    ),
    Bug(
        "a torn step of completions kept",
        r"if not member\.eof or json",
        r"if json",
        "test_later_steps_and_a_torn_one_are_cut_off_and_the_rest_is_read_in_one_line",
    ),
    Bug(
        "a rank with another config trains along",
        r"if first\.get\(name\) != theirs\.get\(name\)",
        r"if False",
        "test_ranks_with_another_config_end_with_its_first_key",
    ),
    Bug(
        "a node with a newer checkpoint is not heard",
        r"        if step > first:\n",
        r"        if step > 10**9:\n",
        "test_a_node_with_a_newer_checkpoint_than_rank_0s_ends_the_start",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="bugs with this text in their or a test's name")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--at-once", type=int, default=2, help="as many copies of the tree")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in f"{bug.name} {bug.test}"]
    start, num_caught = time.perf_counter(), 0
    # Without bytecode: a file that is changed twice in a second would be taken for the old one.
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ |= settings
    fork = get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.at_once, fork, prepare, (options.tree, folder)) as pool,
    ):
        names = sorted({bug.test for bug in bugs})
        parts = [names[first :: options.at_once] for first in range(options.at_once)]
        for failed, output in pool.map(run_tests, filter(None, parts)):
            if failed != "":
                sys.exit(f"{output}\nwithout any bug: {failed or 'not all tests ran'}")
        elapsed_s = time.perf_counter() - start
        print(f"Without a bug all {len(names)} tests pass ({elapsed_s:.0f} s).\n")
        print("| bug | test that failed | seconds |\n|---|---|---|")
        for line, is_caught in pool.map(plant, bugs):
            print(line, flush=True)
            num_caught += is_caught
    elapsed_s = time.perf_counter() - start
    print(f"\n{num_caught} of {len(bugs)} bugs are caught ({elapsed_s:.0f} s).")
    sys.exit(num_caught < len(bugs))


def prepare(tree: Path, folder: str) -> None:
    """A worker's copy of the tree, and the packages, whose imports would take seconds a test."""
    global TREE
    TREE = copy_tree(tree, Path(folder, f"tree-{os.getpid()}"))
    del sys.path[0]  # benchmarks/, whose files no test imports
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def plant(bug: Bug) -> tuple[str, bool]:
    """Run the bug's test with it in the tree, then mend that; a table's line, and if it failed."""
    start, failed, found = time.perf_counter(), None, find(bug.expression, TREE)
    result = f"NOT PLANTED: the expression matches {len(found)} times, not once"
    if len(found) == 1:
        text = found[0].read_text()
        found[0].write_text(re.sub(bug.expression, bug.replacement, text))
        failed, output = run_tests([bug.test])
        found[0].write_text(text)
        result = failed or ("NOT CAUGHT" if failed == "" else f"NO TEST RAN: {output[-500:]}")
    return f"| {bug.name} | {result} | {time.perf_counter() - start:.0f} |", bool(failed)


def find(expression: str, tree: Path) -> list[Path]:
    """A tree's program files in which the expression matches, each as often as it does."""
    files = [path for path in sorted(tree.rglob("*.py")) if not is_apart(path.relative_to(tree))]
    return [path for path in files for _ in re.finditer(expression, path.read_text())]


def is_apart(path: Path) -> bool:
    return path.parts[0] in ("tests", "benchmarks")


def run_tests(names: list[str]) -> tuple[str | None, str]:
    """The first of the tests that fails, "" if all pass, None if they did not run; their output."""
    ids = []
    for name in names:
        function, bracket, case = name.partition("[")
        stem, _, function = function.rpartition("::")
        files = TREE.glob(f"tests/**/{stem or '*'}.py")
        files = [path for path in files if f"def {function}(" in path.read_text()]
        assert len(files) == 1, f"{name} is in {len(files)} files of tests/: name one"
        ids.append(f"{files[0].relative_to(TREE)}::{function}{bracket}{case}")
    log = TREE.with_suffix(".log")
    process = get_context("fork").Process(target=call_pytest, args=(ids, log))
    process.start()
    process.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what a test has left running
    output = log.read_text(errors="replace")
    failed = re.search(r"^FAILED \S+?::(.+?)(?: - .*)?$", output, re.MULTILINE)
    name = failed[1] if failed and process.exitcode == 1 else {0: ""}.get(process.exitcode)
    return name, output


def call_pytest(ids: list[str], log: Path) -> None:
    """In a fork: `python -m pytest` in the tree, which writes to the file."""
    import pytest

    os.setsid()
    os.chdir(TREE)
    sys.path.insert(0, str(TREE))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["pytest"]
    how = ["-x", "-n", "0", "-p", "no:cacheprovider", "-rf", f"--timeout={TIMEOUT_S}"]
    sys.exit(int(pytest.main([*how, *ids])))


def copy_tree(tree: Path, copy: Path) -> Path:
    """A copy of what git tracks or would track of a tree, as it is on the disk; returns `copy`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (tree / name).is_file():  # it may be deleted, and that not yet committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
    return copy


if __name__ == "__main__":
    main()
