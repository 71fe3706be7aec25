"""KL estimators by hand, and which of them has the gradient of the divergence."""

import pytest

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_estimators_of_one_token_a17(lab, dtype):
    # log p = -1, log q = -1.5: r = 0.5, r^2 / 2 = 0.125, e^-0.5 - 1 + 0.5 = 0.106531.
    # With the sign turned round the last would be e^0.5 - 1 - 0.5 = 0.148721.
    said = [lab("kl_of", name, -1.0, -1.5, dtype) for name in ("k1", "k2", "k3")]
    assert said == pytest.approx([0.5, 0.125, 0.106531], abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "mean", "gradient"),
    [
        # KL = 0.5 ln 2.5 + 0.3 ln 0.6 + 0.2 ln(2/3) = 0.223805
        ("k1", 0.223805, [0.0, 0.0, 0.0]),
        ("k2", 0.265479, [0.346243, -0.220389, -0.125854]),
        ("k3", 0.223805, [0.3, -0.2, -0.1]),
    ],
)
def test_only_k2_has_the_gradient_of_the_divergence_a19(lab, estimator, mean, gradient):
    expected, found = lab("kl_in_expectation", estimator, P, Q)
    assert expected == pytest.approx(mean, abs=1e-5)
    assert found == pytest.approx(gradient, abs=1e-5)
