"""Progress and early stop of iterative estimators, through scikit-learn's callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["IterativeMixin", "Steps"]


class IterativeMixin:
    """Callbacks (progress, early stop) for iterative estimators, where scikit-learn has them (1.9 and later).

    Nothing of scikit-learn's callback package is loaded before an estimator is given a callback.
    """

    def set_callbacks(self, *callbacks: Any) -> Any:
        """Set callbacks that `fit` reports to.

        Parameters
        ----------
        *callbacks : callback instances
            For example :class:`sklearn.callback.ProgressBar`. None of them removes those set before.

        Returns
        -------
        estimator
            This estimator.

        Raises
        ------
        ImportError
            If scikit-learn is older than 1.9.
        """
        return _callback_support().set_callbacks(self, *callbacks)

    def _init_callback_context(self, *args: Any, **kwargs: Any) -> Any:
        return _callback_support()._init_callback_context(self, *args, **kwargs)

    @contextlib.contextmanager
    def _iterations(self, max_iter: int | None, X: Any = None, y: Any = None) -> Iterator[Steps]:
        """Yield what an iteration loop calls at the end of every iteration; see :class:`Steps`.

        Parameters
        ----------
        max_iter : int or None
            Largest number of calls, None if it is not known.
        X, y : array or None
            What `fit` got, for the callbacks that ask for it.
        """
        if not hasattr(self, "_skl_callbacks") and not hasattr(self, "_parent_callback_ctx"):
            yield Steps()
            return
        from sklearn.callback import with_callbacks

        # A decorated function calls the teardown hooks when it returns: here that is all it does.
        tear_down = with_callbacks(lambda _: None)
        try:
            context = self._init_callback_context(max_subtasks=max_iter)
            context.call_on_fit_task_begin(estimator=self, X=X, y=y)
            steps = Steps(self, context, max_iter, X, y)
            yield steps
            steps.close()
            context.call_on_fit_task_end(estimator=self, X=X, y=y)
        finally:
            tear_down(self)


class Steps:
    """Reports the end of each iteration to the callbacks; without callbacks, calling it does nothing.

    Attributes
    ----------
    stop_requested : bool
        Whether a callback has asked to stop.
    """

    def __init__(
        self, estimator: Any = None, context: Any = None, max_iter: int | None = None, X: Any = None, y: Any = None
    ) -> None:
        self.stop_requested = False
        self._estimator, self._context, self._max_iter = estimator, context, max_iter
        self._data = {"X": X, "y": y}
        self._n_begun = 0
        self._task: Any = None
        self._begin()

    def _begin(self) -> None:
        if self._context is None or self._n_begun == self._max_iter:
            return
        self._n_begun += 1
        task = self._context.subcontext(task_name="iteration")
        self._task = task.call_on_fit_task_begin(estimator=self._estimator, **self._data)

    def __call__(
        self, metadata: dict[str, Any] | None = None, attributes: Callable[[], dict[str, Any]] | None = None
    ) -> bool:
        """End an iteration.

        Parameters
        ----------
        metadata : dict, default=None
            Numbers of this iteration, such as ``{"objective": 0.3}``.
        attributes : callable, default=None
            Returns the fitted attributes with which the estimator could transform as of now. It is called only if a
            callback wants a fitted estimator.

        Returns
        -------
        bool
            Whether a callback asks to stop: leave the loop, as if `max_iter` had been reached.
        """
        if self._task is None:
            return self.stop_requested
        task, self._task = self._task, None
        self.stop_requested |= bool(
            task.call_on_fit_task_end(
                estimator=self._estimator, metadata=metadata, reconstruction_attributes=attributes, **self._data
            )
        )
        if not self.stop_requested:
            self._begin()
        return self.stop_requested

    def close(self) -> None:
        """End an iteration that was begun but not reported."""
        if self._task is not None:
            task, self._task = self._task, None
            task.call_on_fit_task_end(estimator=self._estimator, **self._data)


def _callback_support() -> Any:
    try:
        from sklearn.callback import CallbackSupportMixin
    except ImportError as error:
        raise ImportError("Callbacks need scikit-learn 1.9 or later: pip install -U scikit-learn.") from error
    return CallbackSupportMixin
