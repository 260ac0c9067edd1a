"""An advantage of one's own, as README shows one: RLOO (arXiv:2402.14740), leave one out."""


def rloo(rewards, **kwargs):
    """The reward minus the mean of the group's other rewards; (N, G) to (N, G)."""
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others
