"""The configured model on this machine: its folder, revision and block layout. Knows nothing of tensors.

Invariant: what `locate_model` returned fits the configured pools and contexts.
"""

from pathlib import Path

from cluster.config import HeadraceConfig
from cluster.plan import Model, check_fits
from engine.checkpoint import resolve, revision, silent
from engine.gguf_conversion import Progress
from protocol.errors import ConfigError


def locate_model(config: HeadraceConfig, progress: Progress = silent) -> Model:
    """The configured model on this machine, fetched and converted on first use. Raises ConfigError."""
    path = resolve(config.model, Path(config.cache_dir).expanduser() / "models", progress)
    from engine.model_config import ModelConfig

    model = ModelConfig.load(path)
    longest = config.engine.max_context_tokens
    if longest > model.max_position_embeddings:
        field = "engine.max_context_tokens"
        raise ConfigError(f"{field}: {longest} is more than the {model.max_position_embeddings} positions of {config.model}", field=field)
    layout = model.layout(config.engine.block_tokens, config.engine.dtype)
    check_fits(config, layout)
    return Model(path=str(path), revision=revision(path), layout=layout)
