"""What would improve the model of a finished run, judged from its loss curves."""

RISE = 0.02  # of the validation loss from its best, nats: above, the run overfits
MEMORIZED = 0.1  # growth of the gap between validation and training loss, nats


def advice(evaluations, epochs):
    """Returns one line of advice, or None if there are fewer than three evaluations.

    The gap between validation and training loss has two causes: the validation text may differ in
    kind, which shows from the first evaluations on, and the model may memorize the training text,
    which makes the gap grow.

    Args:
        evaluations: see RunDir.evaluations; the first is before any training.
        epochs: how often the run has read the training text.
    """
    if len(evaluations) < 3:
        return None
    gaps = [val_loss - train_loss for _, train_loss, val_loss in evaluations]
    lowest, best_step = min((val_loss, step) for step, _, val_loss in evaluations)
    rise = evaluations[-1][2] - lowest
    if rise > RISE:
        return (
            f"the validation loss has risen by {rise:.2f} since step {best_step:,} (overfitting): "
            "use more text, a higher --dropout or fewer steps"
        )
    gap = (
        f"the gap between validation and training loss went from {gaps[1]:z.2f} to {gaps[-1]:z.2f}"
    )
    if gaps[-1] > gaps[1] + MEMORIZED:
        return f"{gap} (memorization): more text would help most"
    help_by = "longer training" if epochs < 1 else "a larger model or longer training"
    return f"{gap} in {epochs:.2g} passes over the text: {help_by} would help most"
