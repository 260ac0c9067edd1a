"""What both take: TRL's code in trl_numbers.py, ours in tests/update/test_trl_numbers.py."""

# Groups of four. The last one is of equals whose mean is exact: of four times 0.1 it is not, and
# TRL then divides a rounding error by 1e-4, where ours are exactly 0.
REWARDS = [[1.1, 0.1, 0.0, 0.1], [1.1, 1.1, 1.1, 0.0], [0.3, 0.7, 0.2, 0.9], [0.5, 0.5, 0.5, 0.5]]

# Four completions of 5, 3, 1 and 4 tokens. Each sign of the advantage meets ratios below, in and
# above the range, and one between 1.2 and 1.28. What stands in the padding must not count.
ROW_ADVANTAGES = [1.5, -0.75, 0.0, -2.0]
LENGTHS = [5, 3, 1, 4]
LOG_PROBS = [
    [-0.5, -1.2, -2.0, -0.3, -3.1],
    [-1.0, -0.4, -2.5, -9.0, -9.0],
    [-1.7, -9.0, -9.0, -9.0, -9.0],
    [-0.2, -1.9, -0.8, -2.2, -9.0],
]
OLD_LOG_PROBS = [
    [-1.0, -1.4, -1.5, -0.3, -3.0],
    [-0.5, -0.9, -2.7, -1.0, -1.0],
    [-1.2, -1.0, -1.0, -1.0, -1.0],
    [-0.2, -1.6, -1.4, -2.1, -1.0],
]
REF_LOG_PROBS = [
    [-0.7, -1.2, -2.9, -0.2, -2.4],
    [-1.6, -0.3, -2.5, -5.0, -5.0],
    [-0.8, -5.0, -5.0, -5.0, -5.0],
    [-0.1, -3.0, -0.8, -2.0, -5.0],
]
CLIP_EPS, CLIP_EPS_HIGH, KL_COEF, MAX_NEW_TOKENS = 0.2, 0.28, 0.1, 6
# GSPO's ratios of these completions are 1.02, 1.07, 0.61 and 1.05: the first is clipped.
GSPO_CLIP_EPS, GSPO_CLIP_EPS_HIGH = 0.01, 0.015
DPPO_DELTA = 0.15  # two tokens moved further as their advantage asks, two against it
