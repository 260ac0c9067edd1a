"""Plant known bugs in copies of the tree, one in each, and see that a quick test fails at each.

    OMP_NUM_THREADS=1 python benchmarks/planted.py               # two at a time, on two cores
    OMP_NUM_THREADS=1 python benchmarks/planted.py --at-once 8
    OMP_NUM_THREADS=1 python benchmarks/planted.py --only top-p

A bug is a regular expression and what takes the place of its match. It is looked for in all Python
files outside tests/ and benchmarks/, and its tests are looked for by name, so that files may move.
The expression must match exactly once. Where the code is rewritten it no longer does, and that is
reported like a bug that no test catches: the expression must then be written anew. First the tests
are run on the tree as it is, since one that fails there shows nothing.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120  # of a test that a bug makes hang


class Bug(NamedTuple):
    name: str
    expression: str
    replacement: str
    test: str  # its name, with the file's where two files have a test of this name


BUGS = [
    Bug(
        "the mask one column late",
        r"completion_mask = (~?)right_pad\((\w+), (True|False)\)",
        r"completion_mask = \1torch.nn.functional.pad(right_pad(\2, \3), (1, -1), value=\3)",
        "test_update::test_the_gradient_does_not_depend_on_the_micro_batch_size",
    ),
    Bug(
        "no_sync on the last micro-batch too",
        r" and micro_batch is not micro_batches\[-1\]",
        r"",
        "test_update::test_the_gradient_does_not_depend_on_the_number_of_ranks",
    ),
    Bug(
        "denominators per rank",
        r"= world\.sum\(counts\)\.tolist\(\)",
        r"= *counts[:2], world.sum(counts).tolist()[2]",
        "test_update::test_the_gradient_does_not_depend_on_the_number_of_ranks",
    ),
    Bug(
        "the scorer at temperature 1 where sampling has 0.7",
        r"batch\.completion_mask\), policy\.params\.temperature\b",
        r"batch.completion_mask), 1.0",
        "test_the_gradient_is_that_of_the_distribution_that_was_sampled",
    ),
    Bug(
        "the checkpoint written before the log",
        r"( +)log_step\(run, metrics",
        r"\1save_checkpoint(run)\n\1log_step(run, metrics",
        "test_a_run_that_dies_as_it_writes_its_log_has_no_checkpoint_of_that_step",
    ),
    Bug(
        "the stream's position left out of the checkpoint",
        r'"state": asdict\(state\)',
        r'"state": asdict(state) | {"position": 0}',
        "test_an_exception_leaves_the_last_checkpoint_and_the_run_goes_on_bit_for_bit",
    ),
    Bug(
        "the KL reference made of the checkpoint",
        r"( +)resume\(run\)\n",
        r"\1resume(run)\n\1from engine.model.policy import make_reference\n"
        r"\1policy.reference = make_reference(policy.scorer, policy, lora=None)\n",
        "test_a_resumed_run_is_held_near_the_model_that_it_started_from",
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
        r"np\.pad\(~completion\.is_inserted, ",
        r"np.pad(np.r_[~completion.is_inserted[:-1], completion.truncated], ",
        "test_the_end_token_is_trained",
    ),
    Bug(
        "a zero-advantage row left out of the denominator",
        r"counts = \[len\(batch\), sum\((.*?) for t in batch\)",
        r"counts = [len(trained), sum(\1 for t in trained)",
        "test_update::test_the_gradient_does_not_depend_on_the_micro_batch_size",
    ),
    Bug(
        "the evaluation's seeds those of training",
        r"TRAINING, VALIDATION = 0, 1",
        r"TRAINING, VALIDATION = 0, 0",
        "test_training_and_validation_never_draw_the_same_random_numbers",
    ),
    Bug(
        "world.size left out of the weights",
        r"token_weights=weights \* world\.size",
        r"token_weights=weights",
        "test_update::test_the_gradient_does_not_depend_on_the_number_of_ranks",
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
        r"state\.last > state\.best\b",
        r"state.last >= state.best",
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
        r"np\.pad\(~completion\.is_inserted, ",
        r"np.pad(np.ones_like(completion.is_inserted), ",
        "test_the_gradient_is_that_of_the_sampled_tokens_alone",
    ),
    Bug(
        "random numbers without training.seed",
        r"\(TRAINING, training\.seed, position\)",
        r"(TRAINING, position)",
        "test_each_step_draws_for_the_next_questions_by_the_runs_seed",
    ),
    Bug(
        "the stream's position one too far",
        r"run\.advance\(metrics, next_position,",
        r"run.advance(metrics, next_position + 1,",
        "test_each_step_draws_for_the_next_questions_by_the_runs_seed",
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
        "test_both_backends_draw_the_same_tokens_and_score_them_alike",
    ),
    Bug(
        "the optimizer's state not loaded",
        r"\n +run\.optimizer\.load_state_dict\(.*?\n",
        r"\n",
        "test_an_exception_leaves_the_last_checkpoint_and_the_run_goes_on_bit_for_bit",
    ),
    Bug(
        "one checkpoint more kept",
        r"whole\[keep:\]",
        r"whole[keep + 1 :]",
        "test_all_checkpoints_are_kept_where_no_number_is_given",
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
        "test_kl::test_the_gradient_is_that_of_all_rows_in_any_micro_batches",
    ),
    Bug(
        "advantages above 0 alone",
        r"t\.advantage != 0\.0",
        r"t.advantage > 0.0",
        "test_update::test_the_gradient_does_not_depend_on_the_micro_batch_size",
    ),
    Bug(
        "the learning rate of the step before",
        r"learning_rate_at\(state\.step \+ 1, training\)",
        r"learning_rate_at(state.step, training)",
        "test_optimizer::test_a_run_in_two_parts_is_the_unbroken_one",
    ),
    Bug(
        "an evaluation as long as training",
        r"max_new_tokens=config\.max_validation_tokens",
        r"max_new_tokens=config.training.max_new_gen_tokens",
        "test_validation_has_its_own_length_and_a_greedy_one_samples_once",
    ),
    Bug(
        "a broken model taken for the best",
        r"is_best = not is_broken and ",
        r"is_best = ",
        "test_a_model_with_a_broken_completion_is_never_the_best",
    ),
    Bug(
        "a second Ctrl-C without effect",
        r"if is_interrupt and now_s",
        r"if False and now_s",
        "test_only_a_second_ctrl_c_ends_a_run_before_it_is_saved",
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
        "test_the_environment_hears_the_models_words_alone_in_each_turn",
    ),
    Bug(
        "an environment's dice without the turn",
        r"else \(\*self\.seed, self\.num_turns\)",
        r"else self.seed",
        "test_each_turn_has_random_numbers_of_its_own",
    ),
    Bug(
        "the first questions to each rank's answers",
        r"mine = questions\[world\.rank :: world\.size\]",
        r"mine = questions[: len(groups)]",
        "test_each_rank_reads_its_answers_against_their_own_questions",
    ),
    Bug(
        "validation questions cut into one piece a rank",
        r"range\(run\.world\.rank, len\(run\.validation_questions\), run\.world\.size\)",
        r"[*range(len(run.validation_questions))][run.world.rank * "
        r"-(-len(run.validation_questions) // run.world.size) :][: "
        r"-(-len(run.validation_questions) // run.world.size)]",
        "test_the_ranks_take_turns_with_the_validation_questions",
    ),
    Bug(
        "the first validation questions beside each rank's samples",
        r"run\.validation_questions\[run\.world\.rank :: run\.world\.size\]",
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
        "test_the_kl_penalty_of_a_token_far_from_the_reference_is_finite",
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
        r'f"\{step\} evaluated" if is_evaluation\(metrics\) else str\(step\)',
        r"str(step)",
        "test_mlflow_keeps_whether_the_last_evaluation_was_sent",
    ),
    Bug(
        "wandb's last evaluation sent again",
        r"\[step, is_evaluation\(metrics\)\]",
        r"[step, False]",
        "test_a_resumed_wandb_run_is_the_one_that_its_server_has",
    ),
    Bug(
        "a resumed wandb run refused",
        r'resume="allow"',
        r'resume="never"',
        "test_a_resumed_wandb_run_is_the_one_that_its_server_has",
    ),
    Bug(
        "the tokenizer's end imitated, not the template's",
        r"tokenizer\.eos_token_id if end is None else end",
        r"tokenizer.eos_token_id",
        "test_an_answer_ends_as_the_chat_template_ends_a_turn",
    ),
    Bug(
        "answers imitated in the file's order",
        r"QuestionStream\(run\.answers, training\.seed, True,",
        r"QuestionStream(run.answers, training.seed, False,",
        "test_each_rank_imitates_its_own_share_of_the_shuffled_answers",
    ),
    Bug(
        "the same answers imitated on each rank",
        r"drawn\[world\.rank \* per_rank :\]\[:per_rank\]",
        r"drawn[:per_rank]",
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
        r"    policy\.sampler\.eval\(\)\n",
        r"",
        "test_dropout_acts_in_the_update_alone",
    ),
    Bug(
        "a step with broken rows trained on",
        r"batches = \[\] if is_broken else ",
        r"batches = ",
        "test_a_model_that_goes_nan_ends_the_run_and_the_last_good_checkpoint_is_kept",
    ),
    Bug(
        "an update in eval mode",
        r"    policy\.model\.train\(\)\n",
        r"",
        "test_dropout_acts_in_the_update_alone",
    ),
    Bug(
        "a bool mask added to the scores",
        r"torch\.zeros_like\(mask, dtype=self\.dtype\)\[:, None, None\]\n        full = "
        r"full\.masked_fill\(~mask\[:, None, None\], torch\.finfo\(self\.dtype\)\.min\)",
        r"mask.to(self.dtype)[:, None, None]",
        "test_eager_attention_is_scored_as_it_was_sampled",
    ),
    Bug(
        "random numbers by a question's place on its rank",
        r"for position, _ in mine\]",
        r"for position, _ in enumerate(mine)]",
        "test_each_step_draws_for_the_next_questions_by_the_runs_seed",
    ),
    Bug(
        "the seed of a question's kind alone",
        r"default_rng\(list\(seed\)\)",
        r"default_rng(seed[0])",
        "test_two_equal_questions_with_different_seeds_get_different_samples",
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
        "test_both_backends_draw_the_same_tokens_and_score_them_alike",
    ),
    Bug(
        "tokens scored where they stand",
        r"token_ids, mask_there = input_ids\[:, columns \+ 1\]",
        r"token_ids, mask_there = input_ids[:, columns]",
        "test_padded_and_batched_log_probs_equal_those_of_each_row_alone",
    ),
    Bug(
        "tokens counted after the end",
        r"record\.rows, record\.active\.long\(\)",
        r"record.rows, torch.ones_like(record.rows)",
        "test_a_completion_ends_with_its_first_eos_or_at_the_limit",
    ),
    Bug(
        "uniforms of other rows after some have left",
        r"self\.tokens, self\.uniforms = self\.tokens\[indices\], self\.uniforms\[indices\]",
        r"self.tokens, self.uniforms = self.tokens[indices], self.uniforms[: len(indices)]",
        "test_a_question_gets_the_same_completions_in_every_batch",
    ),
    Bug(
        "completions in the order of lengths",
        r"for j, i in enumerate\(batch\):",
        r"for j, i in enumerate(sorted(batch)):",
        "test_a_question_gets_the_same_completions_in_every_batch",
    ),
    Bug(
        "greedy tokens scored at temperature 0.01",
        r"if params\.temperature not in \(0, 1\):",
        r"if params.temperature != 1:",
        "test_temperature_0_takes_the_likeliest_tokens_and_scores_them_at_1",
    ),
    Bug(
        "log-probabilities of what top-p has kept",
        r"log_probs = logits - log_sum\[:, None\]",
        r"log_probs = keep_likeliest(probs, params.top_p, params.top_k).log()",
        "test_log_probs_and_entropies_are_those_of_the_whole_distribution_at_the_temperature",
    ),
    Bug(
        "an index of a block too far",
        r"right=True\)\.clamp\(max=cdf\.shape\[1\] - 1\)",
        r"right=False).clamp(max=cdf.shape[1] - 1)",
        "test_extreme_uniforms_never_draw_a_token_of_probability_zero",
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
        "test_sil_imitates_the_k_best_of_every_group_of_equals_too",
    ),
    Bug(
        "a mean over the batch, not the group",
        r"rewards - rewards\.mean\(dim=1, keepdim=True\)\n    if divide",
        r"rewards - rewards.mean()\n    if divide",
        "test_advantage_is_the_reward_minus_the_mean_of_its_own_group",
    ),
    Bug(
        "the clip on the wrong side",
        r"\.minimum\(clipped \* advantages\)",
        r".maximum(clipped * advantages)",
        "test_the_clip_cuts_what_goes_too_far_and_only_that",
    ),
    Bug(
        "a ratio without a gradient",
        r"ratio = \(log_probs - old_log_probs\)\.exp\(\)",
        r"ratio = (log_probs - old_log_probs).exp().detach()",
        "test_reinforce_and_the_ratio_have_the_same_gradient_while_the_ratio_is_one",
    ),
    Bug(
        "GSPO's mean over the padding too",
        r"means = \(log_probs \* completion_mask\)\.sum\(dim=1, keepdim=True\) / "
        r"lengths\.clamp\(min=1\)",
        r"means = (log_probs * completion_mask).mean(dim=1, keepdim=True)",
        "test_gspo_clips_whole_completions_by_hand",
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
        r"\[replace\(batch\[0\], advantage=0\.0\)\], math\.inf, math\.inf",
        r"[replace(batch[0], advantage=0.0)], num_rows, num_tokens",
        "test_the_row_of_a_rank_without_a_lesson_weighs_nothing",
    ),
    Bug(
        "a shard's added pass weighs as the first",
        r"replace\(first, trajectories=\[\], token_weights=weights\)",
        r"replace(first, trajectories=[])",
        "test_a_pass_that_a_shard_adds_has_no_completions",
    ),
    Bug(
        "gradients held twice",
        r"zero_grad\(set_to_none=not in_ddp\)\n            loss = 0\.0",
        r"zero_grad()\n            loss = 0.0",
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
        r"    policy\.refresh_sampler\(\)\n    return metrics",
        r"    return metrics",
        "test_the_copy_that_samples_has_the_weights_of_each_update",
    ),
    Bug(
        "truncated rows out of the counts too",
        r"trained = \[t for t in trained if not t\.completion\.truncated\]",
        r"batch = trained = [t for t in trained if not t.completion.truncated]",
        "test_truncated_rows_can_be_skipped_but_stay_in_the_counts",
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
        r'group\["lr"\] = learning_rate \* group\["lr_scale"\]',
        r'group["lr"] = learning_rate',
        "test_muon_steps_the_blocks_matrices_and_adamw_the_rest_each_at_its_rate",
    ),
    Bug(
        "the old folder removed before the new one has its name",
        r"        folder\.rename\(old\)\n",
        r"        remove(folder)\n",
        "test_a_kill_at_any_file_event_leaves_the_old_or_the_new_folder",
    ),
    Bug(
        "what a killed save left kept for ever",
        r"in \[\*outdated, \*left_by_kills\]:",
        r"in outdated:",
        "test_what_a_killed_save_left_goes_with_the_next",
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
        "test_an_optimizer_that_holds_code_is_refused_before_that_runs",
    ),
    Bug(
        "a lock that two runs can hold",
        r"fcntl\.LOCK_EX \| fcntl\.LOCK_NB",
        r"fcntl.LOCK_SH | fcntl.LOCK_NB",
        "test_a_folder_is_locked_by_one_alone",
    ),
    Bug(
        "deleted checkpoints forgotten",
        r"\(folder / MARKER\)\.exists\(\) or list_checkpoints\(root\)",
        r"list_checkpoints(root)",
        "test_a_run_is_known_though_its_checkpoints_were_deleted",
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
        r"return 1 if run\.unsaved else 0",
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
        "test_a_task_that_exits_is_a_failure",
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
        r"self\.boards = \[other for other in self\.boards if other is not board\]",
        r"pass",
        "test_a_board_that_has_failed_is_not_called_again",
    ),
    Bug(
        "a resumed run doubles the last step's evaluation",
        r'\(r\["step"\], is_evaluation\(r\)\) <= \(resume_step, is_evaluated\)',
        r'r["step"] <= resume_step',
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
        r'"before training": run\.state\.untrained,',
        r'"before training": after,',
        "test_the_text_has_scores_beside_those_without_training_and_the_settings_of_the_recipe",
    ),
    Bug(
        "a card with a path of this machine",
        r"datasets=\[task\.train\] if is_on_hub\(task\.train\) else None",
        r"datasets=[task.train]",
        "test_a_base_and_data_that_are_no_hub_ids_are_in_the_text_alone",
    ),
    Bug(
        "a file's key comes before the command line's",
        r"merge\(without_other_task\(from_file, from_command_line\), from_command_line\)",
        r"merge(from_command_line, without_other_task(from_file, from_command_line))",
        "test_later_overrides_win_over_earlier_ones_and_these_over_the_file",
    ),
    Bug(
        "tiny's learning rate for any model",
        r"        check_default_rate\(config\)\n",
        r"        pass\n",
        "test_tinys_learning_rate_is_refused_for_other_models",
    ),
    Bug(
        "an evaluation into a folder of its own",
        r'\.resolve\(\)\.parents\[:2\]:\n            if \(folder / "metrics\.jsonl"\)',
        r'.resolve().parents[:1]:\n            if (folder / "metrics.jsonl")',
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
        "test_a_turn_is_the_last_after_max_turns_or_with_another_end_token",
    ),
    Bug(
        "a tool's token asks the tool",
        r"asks = self\.active & is_drawn & ",
        r"asks = self.active & ",
        "test_three_turns_by_hand_their_ids_and_which_of_them_are_trained",
    ),
    Bug(
        "an inserted end token ends the row",
        r"!= record\.end_ids\)\.all\(dim=1\) \| ~is_drawn",
        r"!= record.end_ids).all(dim=1)",
        "test_an_end_token_that_is_inserted_ends_nothing",
    ),
    Bug(
        "the first expression calculated, not the last",
        r"text\.rpartition\(self\.opening\)",
        r"text.partition(self.opening)",
        "test_what_cannot_be_calculated_is_left_to_the_model",
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
        "test_the_band_of_several_seeds_is_from_the_lowest_to_the_highest",
    ),
    Bug(
        "code that a grader runs not seen",
        r'\("exec", "os\.system", "subprocess\.Popen"\)',
        r'("os.system", "subprocess.Popen")',
        "test_each_kind_is_found_in_a_naive_grader",
    ),
    Bug(
        "a token's weight in rollouts.jsonl times the ranks",
        r"= weight / num_ranks",
        r"= weight",
        "test_a_line_holds_the_groups_completions_best_first",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="bugs with this text in their name")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--at-once", type=int, default=2, help="as many copies of the tree")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in bug.name]
    start, num_caught = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()  # those in which no test runs now
        for number in range(options.at_once):
            trees.put(copy_tree(options.tree, Path(folder, f"tree-{number}")))
        names = sorted({bug.test for bug in bugs})
        parts = [names[first :: options.at_once] for first in range(options.at_once)]
        for failed, output in pool.map(lambda part: check(part, trees), filter(None, parts)):
            if failed != "":
                sys.exit(f"{output}\nwithout any bug: {failed or 'not all tests ran'}")
        elapsed_s = time.perf_counter() - start
        print(f"Without a bug all {len(names)} tests pass ({elapsed_s:.0f} s).\n")
        print("| bug | test that failed | seconds |\n|---|---|---|")
        for line, is_caught in pool.map(lambda bug: plant(bug, trees), bugs):
            print(line, flush=True)
            num_caught += is_caught
    elapsed_s = time.perf_counter() - start
    print(f"\n{num_caught} of {len(bugs)} bugs are caught ({elapsed_s:.0f} s).")
    sys.exit(num_caught < len(bugs))


@contextlib.contextmanager
def one_of(trees: SimpleQueue) -> Iterator[Path]:
    """Take a tree out of the queue while it is used."""
    tree = trees.get()
    try:
        yield tree
    finally:
        trees.put(tree)


def check(names: list[str], trees: SimpleQueue) -> tuple[str | None, str]:
    """Run tests without a bug; the first that fails as in `run_tests`, and their output."""
    with one_of(trees) as tree:
        return run_tests(tree, names)


def plant(bug: Bug, trees: SimpleQueue) -> tuple[str, bool]:
    """Run the bug's test with it in a tree, then mend that; a table's line, and if it failed."""
    start, failed = time.perf_counter(), None
    with one_of(trees) as tree:
        found = find(bug.expression, tree)
        result = f"NOT PLANTED: the expression matches {len(found)} times, not once"
        if len(found) == 1:
            text = found[0].read_text()
            found[0].write_text(re.sub(bug.expression, bug.replacement, text))
            failed, output = run_tests(tree, [bug.test])
            found[0].write_text(text)
            result = failed or ("NOT CAUGHT" if failed == "" else f"NO TEST RAN: {output[-500:]}")
    return f"| {bug.name} | {result} | {time.perf_counter() - start:.0f} |", bool(failed)


def find(expression: str, tree: Path) -> list[Path]:
    """The program's files in which the expression matches, each as often as it does."""
    files = [path for path in sorted(tree.rglob("*.py")) if not is_apart(path.relative_to(tree))]
    return [path for path in files for _ in re.finditer(expression, path.read_text())]


def is_apart(path: Path) -> bool:
    return path.parts[0] in ("tests", "benchmarks")


def run_tests(tree: Path, names: list[str]) -> tuple[str | None, str]:
    """The first of the tests that fails, "" if all pass, None if they did not run; their output."""
    ids = []
    for name in names:
        stem, _, function = name.rpartition("::")
        files = tree.glob(f"tests/**/{stem or '*'}.py")
        files = [path for path in files if f"def {function}(" in path.read_text()]
        assert len(files) == 1, f"{name} is in {len(files)} files of tests/: name one"
        ids.append(f"{files[0].relative_to(tree)}::{function}")
    # Without bytecode: a file that is changed twice in a second would be taken for the old one.
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    how = ["-x", "-n", "0", "-p", "no:cacheprovider", "-rf", f"--timeout={TIMEOUT_S}"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *how, *ids],
        cwd=tree,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^FAILED \S+?::(.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    name = failed[1] if failed and result.returncode == 1 else {0: ""}.get(result.returncode)
    return name, result.stdout + result.stderr


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
