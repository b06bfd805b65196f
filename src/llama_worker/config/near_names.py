"""What somebody may have meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The options of llama-server that people write by hand (b11434).
_LONG_ONES = """
    --alias --api-key --api-key-file --api-prefix --batch-size --cache-prompt --cache-ram
    --cache-reuse --cache-type-k --cache-type-v --chat-template --chat-template-file
    --chat-template-kwargs --cont-batching --context-shift --control-vector --cpu-mask --cpu-moe
    --ctx-checkpoints --ctx-size --device --embedding --embeddings --fit --flash-attn --gpu-layers
    --grammar --grammar-file --hf-file --hf-repo --hf-token --host --jinja --json-schema --keep
    --kv-offload --kv-unified --list-devices --log-disable --log-file --log-prefix
    --log-timestamps --log-verbosity --lora --lora-scaled --main-gpu --metrics --min-p --mmproj
    --mmproj-url --model --model-draft --model-url --n-cpu-moe --n-gpu-layers --n-predict
    --no-context-shift --no-jinja --no-kv-offload --no-kv-unified --no-mmproj --no-perf
    --no-repack --no-slots --no-ui --no-warmup --no-webui --numa --offline --override-kv
    --override-tensor --parallel --path --pooling --port --predict --presence-penalty --prio
    --props --reasoning --reasoning-budget --reasoning-effort --reasoning-format --repeat-penalty
    --reranking --rope-freq-base --rope-freq-scale --rope-scale --rope-scaling --rpc --samplers
    --seed --sleep-idle-seconds --slot-save-path --slots --split-mode --ssl-cert-file
    --ssl-key-file --swa-full --temp --tensor-split --threads --threads-batch --threads-http
    --timeout --top-k --top-p --ubatch-size --verbose --version --warmup --yarn-orig-ctx
"""
COMMON_OPTIONS = tuple(_LONG_ONES.split())  # a build knows more: its own `--help` lists them


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """`did you mean 'slots'?`; None where nothing known is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else None
