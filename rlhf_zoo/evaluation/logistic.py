"""Logistic regression with fractional targets and weights."""

import numpy as np
from numpy.typing import NDArray


def fit_logistic(
    features: NDArray[np.float64],
    targets: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    ridge: float,
    initial: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Fits a weighted logistic regression with a ridge penalty.

    Args:
        features: (N, K), including a column of ones if the model has an intercept.
        targets: (N,) probabilities in [0, 1].
        weights: (N,) weight of each row.
        ridge: Weight of the penalty, which covers the intercept too.
        initial: (K,) initial β; None for zeros.

    Returns:
        (K,) β that minimizes Σ w·[log(1 + e^(xβ)) − y·xβ] + ½·ridge·‖β‖².
    """
    from scipy.optimize import minimize  # importing it takes longer than most commands take to start

    def loss(beta: NDArray[np.float64]) -> float:
        logits = features @ beta
        return float(weights @ (np.logaddexp(0.0, logits) - targets * logits) + ridge / 2 * (beta @ beta))

    def gradient(beta: NDArray[np.float64]) -> NDArray[np.float64]:
        return features.T @ (weights * (sigmoid(features @ beta) - targets)) + ridge * beta

    def hessian(beta: NDArray[np.float64]) -> NDArray[np.float64]:
        probability = sigmoid(features @ beta)
        return (features.T * (weights * probability * (1 - probability))) @ features + ridge * np.eye(len(beta))

    initial = np.zeros(features.shape[1]) if initial is None else initial
    solution = minimize(loss, initial, jac=gradient, hess=hessian, method="trust-exact", options={"gtol": 1e-10})
    return np.asarray(solution.x)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes 1 / (1 + e^(−x)) without overflow.

    Args:
        x: Log-odds of any shape.

    Returns:
        Probabilities of the same shape.
    """
    probabilities: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -x))
    return probabilities
