"""The registered models, as Freight's own API and the OpenAI API list them."""

from freight.control.context import Context
from freight.control.rights import names_in, seen_by
from freight.core.account import Account
from freight.core.openaibatch import ModelCard, ModelCards
from freight.core.paging import page_of
from freight.core.view import ModelInfo, ModelList
from freight.errors import NoSuchModel


class Models:
    """The models that users may run. `since` is when the service started, in seconds of the clock of day."""

    def __init__(self, context: Context, since: float) -> None:
        self._context = context
        self._since = int(since)

    def page(self, account: Account, limit: int, after: str | None) -> ModelList:
        """Return up to `limit` of the models that the user may run; `after` is an earlier page's `next`."""
        there = seen_by(account, self._context.settings()).models
        names, following = page_of(there, lambda name: (0.0, name), limit, after)
        models = [
            ModelInfo(
                name=name,
                engine=entry.engine,
                aliases=entry.aliases,
                batch=entry.batch,
                gpus=entry.gpus,
                context=entry.context,
                groups=entry.groups if account.is_admin() else None,
            )
            for name, entry in ((name, there[name]) for name in names)
        ]
        return ModelList(models=models, next=following)

    def cards(self, account: Account) -> ModelCards:
        """Return the models that the user may run, by every name that records may call them."""
        return ModelCards(data=[ModelCard(id=name, created=self._since) for name in self._names(account)])

    def card(self, account: Account, name: str) -> ModelCard:
        """Return one of them; raise NoSuchModel for what is none."""
        names = self._names(account)
        if name not in names:
            raise NoSuchModel(f"there is no model {name}", f"models: {', '.join(names) or 'none'}").about("model")
        return ModelCard(id=name, created=self._since)

    def _names(self, account: Account) -> list[str]:
        return names_in(seen_by(account, self._context.settings()))
