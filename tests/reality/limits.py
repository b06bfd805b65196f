"""Limits as tight as honest work on this machine allows, and when a hang has to be found by them.
Pure."""

from llama_worker import TimeoutProfile
from tests.reality.plan import MAX_PROMPT_TOKENS, Episode

# A token at depth 7000 takes so many times what one of the first 256 takes (b11434, CPU).
_DEPTH = 4.0
_LEAST_S = 4.0  # the window of CPU evidence is 3 s
_CPU_WINDOW_S = 3.0
_HEALTH_S = 5.0
_MACHINE_S = 15.0  # what other work on the cores may add to everything that is promised


def tight_limits(episode: Episode, prompt_token_s: float, burners: int) -> TimeoutProfile:
    """A healthy request exceeds none of these.

    While a batch is computed no slot moves and nobody gets anything, so a limit on that has to be
    longer than one batch, deep in a prompt, with all burners beside it; nothing else is allowed
    for. Limits on the whole of a request or of its first token are off: how long it waits for its
    neighbours' prompts is nobody's fault.
    """
    peak = burners + sum(each.count for each in episode.disturbances)
    batch_s = min(episode.shape.batch_tokens, MAX_PROMPT_TOKENS) * prompt_token_s * _DEPTH
    silence_s = _LEAST_S + batch_s * (1 + peak)
    return TimeoutProfile(
        headers_timeout_s=silence_s,
        prefill_liveness_timeout_s=silence_s,
        idle_stream_timeout_s=silence_s,
        silent_work_timeout_s=2 * silence_s,
        suspect_after_s=2.0,
        liveness_probe_interval_s=1.0,
        health_probe_interval_s=_HEALTH_S,
        stop_grace_s=1.0,
    )


def found_within_s(limits: TimeoutProfile, *, in_flight: bool) -> float:
    """Seconds after which a stopped server must have been given up: by the silence of a request, or
    by the health probe where nobody waits."""
    if not in_flight:
        # Each probe may take as long as the time to the next. The first one does not count where a
        # request received data since the one before.
        probes_count = 1 + limits.health_failures_before_restart
        return probes_count * 2 * _HEALTH_S + _MACHINE_S
    silence_s = limits.idle_stream_timeout_s or 0.0
    return silence_s + _CPU_WINDOW_S + 2 * limits.liveness_probe_interval_s + _MACHINE_S
