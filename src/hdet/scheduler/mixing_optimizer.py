"""What a run does if its optimizer mixes the replicas in its step."""

from hdet.records.events import NoteEvent
from hdet.scheduler.run import Run
from hdet.weights.update_watch import MixedParameter, UpdateWatch


def find_mixed(run: Run, watch: UpdateWatch | None) -> MixedParameter | None:
    """Judge the last step, if none was judged yet. All processes must call this together."""
    if watch is None or watch.is_over:
        return None
    return watch.find([run.rates.of(replica) for replica in range(run.replicas.size)])


def give_up_mixed(run: Run, mixed: MixedParameter) -> None:
    """Continue with the given learning rate after a search that the optimizer makes worthless.

    Raises:
        ValueError: If the run explores learning rates after the search, too.
    """
    run.training_loss.clear_first()
    run.clock.scouted(run.progress.step)  # its step is spent
    if run.knob_bank.is_spread():
        raise mixing_error(run, mixed)
    run.log.warn_once(
        "mixing",
        f"scout stopped: {_what_mixes(run, mixed)}. The weights of before the search are restored, "
        "and the learning rate is kept. Pass `scout=None`, or an optimizer that steps every "
        "replica by itself.",
    )
    text = f"scout stopped: {_what_mixes(run, mixed)}"
    run.log.write(NoteEvent(step=run.progress.step, text=text, measures={}))


def mixing_error(run: Run, mixed: MixedParameter) -> ValueError:
    """Return the error of a run that explores learning rates with such an optimizer."""
    return ValueError(
        f"`optimizer` must step every replica by itself where replicas have different learning "
        f"rates: {_what_mixes(run, mixed)}. Pass another optimizer, or `spread=0` without "
        "`knobs=` and `controller=`."
    )


def _what_mixes(run: Run, mixed: MixedParameter) -> str:
    name = type(run.optimizer).__name__
    return f"the step of {name} sends updates from one replica to another: {mixed.text}"
