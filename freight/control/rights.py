"""What only admins may ask of a job, because it reaches further than the user's own things; and for whom models are."""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from freight.config import Config, Pool
from freight.control.resolve import entry_name
from freight.core.account import Account
from freight.core.view import JobRequest
from freight.errors import NotAllowed

LOCAL: Final = "local"


def check_allowed(account: Account, request: JobRequest) -> None:
    """Raise NotAllowed for what the user may not ask for."""
    if account.is_admin():
        return
    if request.priority > 0:
        raise NotAllowed(
            f"priority {request.priority} is for admins; users have their turns one after another",
            "use 0, or less for a job that may wait",
        )


def may_run(account: Account, model: str, config: Config, pool: str = LOCAL) -> bool:
    """Return whether the user may run a model in a pool: what is registered, and for a group of theirs or for all."""
    if account.is_admin():
        return True
    name = entry_name(model, config)
    return name is not None and _is_for(account, config.models[name].groups) and _may_use(account, pool, config)


def _may_use(account: Account, pool: str, config: Config) -> bool:
    return account.is_admin() or _is_for(account, (config.pools.get(pool) or Pool()).groups)


def _is_for(account: Account, groups: Collection[str]) -> bool:
    return not groups or not account.groups.isdisjoint(groups)


def seen_by(account: Account, config: Config, pool: str = LOCAL) -> Config:
    """Return the settings with no models but those that the user may run in a pool."""
    there = {name: entry for name, entry in config.models.items() if may_run(account, name, config, pool)}
    return replace(config, models=there)


def names_in(seen: Config) -> list[str]:
    """Return every name that records may call the models by, aliases last."""
    aliases = [alias for entry in seen.models.values() for alias in entry.aliases]
    return list(dict.fromkeys([*seen.models, *aliases]))


def check_registered(account: Account, model: str, config: Config, pool: str = LOCAL) -> None:
    """Raise NotAllowed where the user may not run a model: paths and URLs would be read and asked as the service."""
    if entry_name(model, config) is None and not account.is_admin():
        raise NotAllowed(
            f"{model} is no registered model, and only admins may run others",
            f"{_models_for(account, config, pool)}; an admin registers more: freight models add",
        )
    check_groups(account, model, config, pool)


def check_groups(account: Account, model: str, config: Config, pool: str = LOCAL) -> None:
    """Raise NotAllowed where a pool, or a model as it is registered now, is for groups that the user is not in."""
    ask = "ask an administrator of this service to add you to a group that may"
    if not _may_use(account, pool, config):
        raise NotAllowed(f"model {model} cannot be run: pool {pool} is for groups that you are not in", ask)
    if entry_name(model, config) is not None and not may_run(account, model, config, pool):
        raise NotAllowed(
            f"model {model} is for groups that you are not in", f"{_models_for(account, config, pool)}; or {ask}"
        )


def _models_for(account: Account, config: Config, pool: str) -> str:
    return f"models: {', '.join(names_in(seen_by(account, config, pool))) or 'none'}"
