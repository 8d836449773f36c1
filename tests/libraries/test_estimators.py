"""An estimator of scikit-learn's whose fitted attributes are refs."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import refs

base = pytest.importorskip("sklearn.base")

X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
Y = X @ np.float32([1, 2])


@refs.jit
def descend(w, x, y, rate):
    w[...] -= rate * refs.grad(lambda w: ((x @ w[...] - y) ** 2).mean())(w)


class Linear(base.RegressorMixin, base.BaseEstimator):
    def __init__(self, rate=0.2):
        self.rate = rate

    def fit(self, x, y):
        self.w_ = refs.new_ref(jnp.zeros(x.shape[1]), name="w")
        for _ in range(50):
            descend(self.w_, x, y, self.rate)
        return self

    def predict(self, x):
        return x @ np.asarray(self.w_)


def test_it_is_cross_validated():
    selection = pytest.importorskip("sklearn.model_selection")
    assert (selection.cross_val_score(Linear(), X, Y, cv=3) > 0.99).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_refs_of_its_own(copied):
    fitted = Linear().fit(X, Y)
    other = copied(fitted)
    np.testing.assert_array_equal(other.predict(X), fitted.predict(X))
    fitted.w_[...] = 0
    np.testing.assert_allclose(other.w_, [1, 2], rtol=1e-3)


def test_a_clone_isnt_fitted():
    clone = base.clone(Linear(0.1).fit(X, Y))
    assert clone.rate == 0.1
    assert not hasattr(clone, "w_")
