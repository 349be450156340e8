"""How likely it is that audits find something, by the formula of docs/audit.md."""


def detection_rate(share, every, steps):
    """Of ``steps`` steps, a multiple of ``every`` first, each with the same share of wrong results."""
    blocks, rest = divmod(steps, every)
    return 1 - (1 - share) ** blocks * (1 - share * rest / every)
