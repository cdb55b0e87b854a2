"""Fourier transforms and complex numbers."""

import torch
from torch import nn
from torch.nn import functional as F

from .table import between_convolutions, between_linears, typed


def _filtered(x):
    """The lower half of the frequencies."""
    spectrum = torch.fft.rfft2(x, norm="ortho")
    keep = torch.ones(spectrum.shape[-2:])
    keep[:, spectrum.shape[-1] // 2 :] = 0
    return torch.fft.irfft2(spectrum * keep, s=x.shape[-2:], norm="ortho")


def _by_parts(x):
    """Real and imaginary parts as channels, as in FFC."""
    spectrum = torch.fft.rfftn(x.float(), dim=(-2, -1), norm="ortho")
    y = torch.stack((spectrum.real, spectrum.imag), -1).permute(0, 1, 4, 2, 3).flatten(1, 2).relu()
    y = y.unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2).contiguous()
    return torch.fft.irfftn(torch.complex(y[..., 0], y[..., 1]), s=x.shape[-2:], norm="ortho")


def _turned(x):
    """By complex numbers, as in the first Llama."""
    angles = torch.arange(12, dtype=torch.float32) / 5
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def _autocorrelation(x):
    spectrum = torch.fft.rfft(x, n=48)
    return torch.fft.irfft(spectrum * spectrum.conj(), n=48)[..., :24] / 24


def _cosine_transform(x):
    """By a complex transform of twice the length."""
    spectrum = torch.fft.fft(torch.cat((x, x.flip(-1)), -1))[..., :24]
    shift = torch.exp(-1j * torch.pi * torch.arange(24) / 48)
    return (spectrum * shift).real / 24


between_convolutions(
    {
        "low_frequencies": _filtered,
        "fourier_units": _by_parts,
        "fft_of_float": lambda x: torch.fft.fft2(x.float()).real.to(x.dtype) / 7,
        "fft_shifted": lambda x: torch.fft.fftshift(torch.fft.fft2(x), (-2, -1)).abs() / 7,
        "fft_back_and_forth": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 2).real,
    },
    *(2, 5, 8, 6),
)

between_linears(
    {
        "turned_by_complex": _turned,
        "autocorrelation": _autocorrelation,
        "cosine_transform": _cosine_transform,
        "fourier_magnitude": lambda x: torch.fft.rfft(x).abs(),
        "hilbert": lambda x: torch.fft.ifft(torch.fft.fft(x) * (torch.arange(24) < 12) * 2).abs(),
        "complex_product": lambda x: (torch.complex(x, x.flip(-1)) * (1 + 0.5j)).real,
        "complex_exponent": lambda x: torch.exp(1j * x).imag,
        "polar": lambda x: torch.view_as_real(torch.polar(x.abs(), x)).flatten(-2),
    },
    *(2, 5, 24),
)


@typed((2, 6, 24))
class FourierMixing(nn.Module):
    """As in FNet: no attention, but the real part of a transform of tokens and channels."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 17)

    def forward(self, x):
        mixed = torch.fft.fft(torch.fft.fft(x.float(), dim=-1), dim=-2).real
        return self.linear(self.norm(x + mixed.to(x.dtype)))


@typed((2, 6, 4, 16))
class GlobalFilter(nn.Module):
    """Complex weights, kept as pairs, times the spectrum."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(6, 3, 16, 2) * 0.3)

    def forward(self, x):
        spectrum = torch.fft.rfft2(self.linear(x).to(torch.float32), dim=(1, 2), norm="ortho")
        spectrum = spectrum * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(spectrum, s=(6, 4), dim=(1, 2), norm="ortho") + x


@typed((2, 6, 8, 6))
class FourierOperator(nn.Module):
    """As in neural operators: a complex parameter mixes the channels of each low frequency."""

    def __init__(self):
        super().__init__()
        self.skip, self.last = nn.Conv2d(6, 9, 1), nn.Conv2d(9, 3, 1)
        self.weight = nn.Parameter(torch.randn(6, 9, 3, 3, dtype=torch.cfloat) * 0.3)

    def forward(self, x):
        low = torch.fft.rfft2(x)[:, :, :3, :3]
        spectrum = torch.zeros(x.shape[0], 9, 8, 4, dtype=torch.cfloat)
        spectrum[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        return self.last(F.gelu(torch.fft.irfft2(spectrum, s=x.shape[-2:]) + self.skip(x)))


@typed((2, 17, 16))
class LongConvolution(nn.Module):
    """As in Hyena: a filter as long as the sequence, by transforms of twice that length."""

    def __init__(self):
        super().__init__()
        self.first, self.filter = nn.Conv1d(17, 24, 3, padding=1), nn.Parameter(torch.randn(24, 16))
        self.bias = nn.Parameter(torch.randn(24, 1))

    def forward(self, x):
        x = self.first(x)
        size = 2 * x.shape[-1]
        kernel = torch.fft.rfft(self.filter.to(torch.float32), n=size) / size
        signal = torch.fft.rfft(x.to(dtype=kernel.real.dtype), n=size)
        y = torch.fft.irfft(signal * kernel, n=size, norm="forward")[..., : x.shape[-1]]
        return (y + x * self.bias).to(x.dtype)


@typed((2, 120))
class Spectrogram(nn.Module):
    """The logarithm of bands of a short time Fourier transform, and a convolution."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.register_buffer("bands", torch.rand(5, 9))
        self.conv = nn.Conv1d(5, 17, 3)

    def forward(self, x):
        spectrum = torch.stft(x, 16, 8, window=self.window, return_complex=True)
        power = spectrum.abs().square()
        logarithm = torch.clamp(self.bands @ power, min=1e-5).log()
        return self.conv((logarithm - logarithm.mean()) / logarithm.std())


@typed((2, 1, 120))
class MaskOfSpectrum(nn.Module):
    """A mask on the spectrum of a signal, and back, as in source separation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(9, 9, 3, padding=1)

    def forward(self, x):
        window = torch.hann_window(16)
        spectrum = torch.stft(x[:, 0], 16, 4, window=window, return_complex=True)
        spectrum = spectrum * self.conv(spectrum.abs()).sigmoid()
        return torch.istft(spectrum, 16, 4, window=window, length=x.shape[-1])


@typed((2, 1, 120))
class PhaseOfSpectrum(nn.Module):
    """Magnitude and phase come of a convolution, as in vocoders."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 18, 7, stride=4, padding=3)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x):
        magnitude, phase = self.conv(x).chunk(2, 1)
        magnitude = torch.exp(magnitude).clip(max=1e2)
        spectrum = magnitude * (torch.cos(phase) + 1j * torch.sin(phase))
        return torch.istft(spectrum, 16, 4, window=self.window, center=True)


@typed((2, 5, 12))
class ComplexLinear(nn.Module):
    """The result is complex."""

    def __init__(self):
        super().__init__()
        self.real, self.imaginary = nn.Linear(12, 17), nn.Linear(12, 17)

    def forward(self, x):
        spectrum = torch.fft.fft(x, norm="ortho")
        a, b = spectrum.real, spectrum.imag
        return torch.complex(self.real(a) - self.imaginary(b), self.real(b) + self.imaginary(a))


@typed((2, 5, 12))
class ComplexWeights(nn.Module):
    """A linear layer of complex weights, as in state space models."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(16, 9)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)

    def forward(self, x):
        x = self.first(x)
        y = torch.complex(x, torch.zeros_like(x)) @ self.weight
        return self.last(torch.cat((y.real, y.imag), -1))
