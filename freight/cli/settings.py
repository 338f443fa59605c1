"""The settings in force, for any command."""

from freight.config import Config, data_folder, load_config


def settings() -> Config:
    """Return the settings, with the registry's models and those that installed packages bring."""
    from freight.store.registry import built_in_models, read_registry

    return load_config(read_registry(data_folder()), built_in_models())
