"""Distances, norms, products, linear systems, sums along a dim, order."""

import torch
from torch import nn
from torch.nn import functional as F

from .table import between_convolutions, between_linears, typed

CENTERS = torch.linspace(-1, 1, 5 * 24).view(5, 24).sin()


def _squares(x):
    """Symmetric positive matrices of 4 x 4, far from singular."""
    a = x[:, :16].view(-1, 4, 4)
    return a @ a.mT + 2 * torch.eye(4)


def _vector(x):
    return x[:, 16:20, None]


def _near_eye(x):
    return torch.eye(4, dtype=x.dtype) + 0.1 * x[:, :16].view(-1, 4, 4)


def _balanced(x):
    """Sums of rows and columns become alike, as in optimal transport."""
    scores = x[:, :20].view(-1, 4, 5)
    for _ in range(3):
        scores = scores - torch.logsumexp(scores, -1, keepdim=True)
        scores = scores - torch.logsumexp(scores, -2, keepdim=True)
    return scores.exp().flatten(1)


def _cells(x):
    """Differences to the centers, weighted by a softmax of products, as in NetVLAD."""
    weights = (x @ CENTERS.T * 2).softmax(-1)
    apart = x[:, None] - CENTERS
    return F.normalize((apart * weights[..., None]).sum(0), dim=1)[:3] * x.norm()


def _mahalanobis(x):
    apart = (x[:, None] - CENTERS)[..., :4]
    inverse = torch.linalg.inv(torch.eye(4) * 2 + torch.ones(4, 4) / 4)
    return torch.sqrt(torch.einsum("bki,ij,bkj->bk", apart, inverse, apart))


def _largest(x):
    """Scores are far apart: the order of the columns by a fixed amount."""
    scores = x.tanh() + 5 * (torch.arange(24) * 7 % 24)
    return x.gather(1, scores.topk(5, 1).indices)


def _by_argmax(x):
    rows = (x.tanh() + 5 * F.one_hot(torch.arange(len(x)) * 7, 24)).argmax(1)
    return torch.linspace(-1, 1, 24 * 11).view(24, 11)[rows] * x[:, :11]


between_linears(
    {
        "distances": lambda x: torch.exp(-torch.cdist(x, CENTERS)),
        "distances_by_product": lambda x: torch.cdist(
            x, CENTERS, compute_mode="use_mm_for_euclid_dist"
        ),
        "distances_of_1": lambda x: torch.cdist(x, CENTERS, p=1.0) / 24,
        "distances_written": lambda x: (
            x.square().sum(1, keepdim=True) + CENTERS.square().sum(1) - 2 * x @ CENTERS.T
        ),
        "distances_of_pairs": lambda x: F.pairwise_distance(x, x.flip(0))[:, None] * x,
        "norm": lambda x: x / torch.norm(x, dim=1, keepdim=True),
        "norm_with_type": lambda x: (
            x / torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64).to(x.dtype)
        ),
        "norm_of_1": lambda x: F.normalize(x, p=1.0, dim=1) * 24,
        "norm_of_matrix": lambda x: x / torch.linalg.matrix_norm(x.view(-1, 4, 6))[:, None],
        "cosine_similarity": lambda x: F.cosine_similarity(x[:, None], CENTERS, dim=-1),
        "einsum_with_centers": lambda x: torch.einsum("bi,ki->bk", x, CENTERS).sigmoid(),
        "bmm": lambda x: torch.bmm(x.view(-1, 4, 6), x.view(-1, 6, 4)).flatten(1) / 6,
        "bmm_with_factory": lambda x: torch.bmm(x.view(-1, 4, 6), torch.ones(len(x), 6, 5)).flatten(
            1
        ),
        "baddbmm": lambda x: torch.baddbmm(
            torch.ones(1, 4, 4), x.view(-1, 4, 6), x.view(-1, 6, 4), beta=0.5, alpha=0.25
        ).flatten(1),
        "addmm": lambda x: torch.addmm(torch.linspace(0, 1, 5), x, CENTERS.T, beta=0.5, alpha=2),
        "addmv": lambda x: x + torch.addmv(x[:, 0], x, CENTERS[1], alpha=0.5)[:, None],
        "addbmm": lambda x: torch.addbmm(
            torch.zeros(4, 4), x.view(-1, 4, 6), x.view(-1, 6, 4), alpha=0.1
        ).view(1, 16),
        "tensordot": lambda x: torch.tensordot(
            x.view(-1, 4, 6), CENTERS[:, :6], ([2], [1])
        ).flatten(1),
        "outer": lambda x: torch.outer(x[0], torch.arange(3.0)).view(1, -1),
        "kron": lambda x: torch.kron(x[:, :6], torch.tensor([[1.0, -0.5]])),
        "cross": lambda x: torch.linalg.cross(
            x.view(-1, 8, 3), torch.tensor([0.0, 0.6, 0.8]).expand(len(x), 8, 3)
        ).flatten(1),
        "inverse": lambda x: torch.linalg.inv(_squares(x)).flatten(1),
        "solve": lambda x: torch.linalg.solve(_squares(x), _vector(x)).flatten(1),
        "solve_in_double": lambda x: (
            torch.linalg.solve(_squares(x).double(), _vector(x).double()).to(x.dtype).flatten(1)
        ),
        "cholesky": lambda x: torch.linalg.cholesky(_squares(x)).flatten(1),
        "cholesky_solve": lambda x: torch.cholesky_solve(
            _vector(x), torch.linalg.cholesky(_squares(x))
        ).flatten(1),
        "triangular_solve": lambda x: torch.linalg.solve_triangular(
            _squares(x).tril(), _vector(x), upper=False
        ).flatten(1),
        "determinant": lambda x: torch.linalg.det(_near_eye(x))[:, None] * x,
        "log_determinant": lambda x: torch.linalg.slogdet(_near_eye(x)).logabsdet[:, None] + x,
        "matrix_exponential": lambda x: torch.linalg.matrix_exp(_near_eye(x)).flatten(1),
        "matrix_power": lambda x: torch.linalg.matrix_power(_near_eye(x), 3).flatten(1),
        "mahalanobis": _mahalanobis,
        "balanced": _balanced,
        "cells_of_features": _cells,
        "prod": lambda x: x * (1 + x[:, :6] / 8).prod(1, keepdim=True),
        "cumsum": lambda x: x.cumsum(1) / 5,
        "cumprod": lambda x: (1 + x / 8).cumprod(1),
        "cumulative_softmax": lambda x: x.softmax(1).cumsum(1),
        "logsumexp": lambda x: x - torch.logsumexp(x, 1, keepdim=True),
        "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
        "logaddexp": lambda x: torch.logaddexp(x, torch.zeros(24)),
        "quantile": lambda x: x - torch.quantile(x, 0.25, dim=1, keepdim=True),
        "quantiles": lambda x: torch.quantile(x, torch.tensor([0.1, 0.5, 0.9]), dim=1).T,
        "median": lambda x: x - x.median(1, keepdim=True).values,
        "kth_value": lambda x: x - x.kthvalue(3, 1, keepdim=True).values,
        "sort": lambda x: x.sort(1, descending=True).values,
        "top_values": lambda x: x.topk(5, 1).values,
        "largest_of_order": _largest,
        "rows_by_argmax": _by_argmax,
        "cummax": lambda x: x.cummax(1).values,
        "standardized": lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6),
        "variance_and_mean": lambda x: torch.cat(torch.var_mean(x, 1, keepdim=True), 1),
        "renormalized": lambda x: torch.renorm(x, 2, 0, 0.5),
        "trapezoid": lambda x: torch.cumulative_trapezoid(x, torch.linspace(0, 1, 24)),
        "differences": lambda x: torch.diff(x, prepend=torch.zeros(len(x), 1)),
        "interpolated": lambda x: torch.lerp(x, x.flip(1), torch.linspace(0, 1, 24)),
        "addcdiv": lambda x: torch.addcdiv(x, x, torch.linspace(1, 2, 24), value=0.5),
        "error_function": lambda x: x * 0.5 * (1.0 + torch.erf(x / torch.tensor(2.0).sqrt())),
        "inverse_sigmoid": lambda x: torch.logit(x.sigmoid(), eps=1e-3),
        "log_gamma": lambda x: torch.lgamma(x.abs() + 1),
        "bessel": lambda x: torch.special.i0e(x),
        "power_of_parameter": lambda x: (
            x.abs().clamp(min=1e-6).pow(torch.tensor(3.0)).mean(1, True)
        ),
        "hypot_and_copysign": lambda x: (
            torch.hypot(x, torch.ones(24)) + torch.copysign(torch.ones(24), x + 9)
        ),
    },
    *(3, 24),
)


def _gram(x):
    features = x.flatten(2)
    return x * features.matmul(features.transpose(1, 2)).mean((1, 2))[:, None, None, None]


def _cost_volume(x):
    """Products with shifted features, and the mean shift by softmax."""
    shifted = torch.stack([F.pad(x, (d, 0))[..., : x.shape[-1]] for d in range(4)], 1)
    weights = (x[:, None] * shifted).mean(2).softmax(1)
    shift = (weights * torch.arange(4, dtype=x.dtype).view(1, 4, 1, 1)).sum(1, keepdim=True)
    return torch.cat((x, shift), 1)


def _whitened(x):
    """By the inverse of the covariance's triangular factor."""
    features = x.flatten(2)
    features = features - features.mean(2, keepdim=True)
    covariance = features @ features.mT / features.shape[2] + torch.eye(x.shape[1])
    factor = torch.linalg.cholesky(covariance.float())
    return torch.linalg.solve_triangular(factor, features, upper=False).view_as(x)


between_convolutions(
    {
        "gram_matrix": _gram,
        "cost_volume": _cost_volume,
        "whitened": _whitened,
        "signed_roots": lambda x: x.sign() * (torch.sqrt(x.abs() + 0.1) - 0.1**0.5),
        "generalized_mean": lambda x: F.avg_pool2d(x.clamp(min=1e-6).pow(3.0), 2).pow(1.0 / 3),
    },
    *(2, 5, 8, 6),
)


@typed(torch.eye(24)[::3] * 4)
class NearestCode(nn.Module):
    """The nearest row of a code book, far nearer than the others, as in VQ-VAE."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 9)
        self.first.weight.data.mul_(0.02).add_(torch.eye(24))
        self.codes = nn.Embedding(24, 24)
        self.codes.weight.data.mul_(0.1).add_(4 * torch.eye(24))

    def forward(self, x):
        x = self.first(x)
        apart = x.square().sum(1, keepdim=True) + self.codes.weight.square().sum(1)
        codes = torch.argmin(apart - 2 * torch.matmul(x, self.codes.weight.t()), 1)
        return self.last(x + (self.codes(codes) - x).detach()), codes


@typed((4, 24), (3, 24))
class Similarities(nn.Module):
    """Of images and texts, scaled by exp of a parameter, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(24, 17, bias=False), nn.Linear(24, 17, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.6593))

    def forward(self, x, y):
        x, y = self.image(x), self.text(y)
        x, y = x / x.norm(dim=-1, keepdim=True), y / y.norm(p=2, dim=-1, keepdim=True)
        scores = self.scale.exp() * x @ y.t()
        return scores, scores.t()


@typed((4, 24))
class MarginOfAngles(nn.Module):
    """Cosines to the classes, whose rows are normalized in float32, as in ArcFace."""

    def __init__(self):
        super().__init__()
        self.linear, self.classes = nn.Linear(24, 17), nn.Parameter(torch.randn(9, 17))

    def forward(self, x):
        x = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            cosine = F.linear(F.normalize(x.float()), F.normalize(self.classes.float()))
            return 64.0 * torch.where(
                cosine > -0.9, (cosine.clamp(-0.99, 0.99).acos() + 0.1).cos(), cosine
            )


@typed((3, 17), (3, 24))
class Mixture(nn.Module):
    """The logarithm of the density of a mixture of normal distributions."""

    def __init__(self):
        super().__init__()
        self.shares, self.means, self.scales = (
            nn.Linear(17, 4),
            nn.Linear(17, 96),
            nn.Linear(17, 96),
        )

    def forward(self, x, y):
        means = self.means(x).view(-1, 4, 24)
        scales = F.softplus(self.scales(x).view(-1, 4, 24)) + 1e-3
        normal = torch.distributions.Normal(means, scales, validate_args=False)
        return torch.logsumexp(
            F.log_softmax(self.shares(x), 1) + normal.log_prob(y[:, None]).sum(2), 1
        )
