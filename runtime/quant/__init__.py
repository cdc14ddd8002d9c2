"""Quantisers: methods that make the low-bit copy C' of the KV cache. Each is a file and a line in a table."""

from __future__ import annotations

from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.runtime.quant.base import KVKind, Planes, Quantizer
from specache_fx.runtime.quant.compared.kivi_original import OriginalKiviQuantizer
from specache_fx.runtime.quant.compared.nuq import NonUniformQuantizer
from specache_fx.runtime.quant.compared.rotated import RotatedQuantizer
from specache_fx.runtime.quant.compared.zipcache import ZipCacheQuantizer
from specache_fx.runtime.quant.identity import IdentityQuantizer
from specache_fx.runtime.quant.keys_only import KeysOnlyQuantizer
from specache_fx.runtime.quant.kivi import KiviQuantizer
from specache_fx.runtime.quant.turboquant import TurboQuantizer

__all__ = ["QUANTIZERS", "KVKind", "Planes", "Quantizer", "make_quantizer"]

QUANTIZERS: dict[str, type[Quantizer]] = {
    KiviQuantizer.name: KiviQuantizer,
    OriginalKiviQuantizer.name: OriginalKiviQuantizer,
    NonUniformQuantizer.name: NonUniformQuantizer,
    RotatedQuantizer.name: RotatedQuantizer,
    TurboQuantizer.name: TurboQuantizer,
    ZipCacheQuantizer.name: ZipCacheQuantizer,
    IdentityQuantizer.name: IdentityQuantizer,
}


def make_quantizer(config: SpecacheConfig) -> Quantizer:
    """Build the quantiser that the config names; `bits=16` is the identity whatever the name.

    Where the policy has no codes it is `KeysOnlyQuantizer`.

    Raises:
        ConfigError: If the name is unknown, or the method has no codes of that width.
    """
    if config.quantizer not in QUANTIZERS:
        raise ConfigError(
            f"quantizer={config.quantizer!r} is not valid: choose one of {', '.join(map(repr, QUANTIZERS))}."
        )
    if not config.placement.codes:
        return KeysOnlyQuantizer(config.bits, config.group_size)
    method = IdentityQuantizer if config.bits == 16 else QUANTIZERS[config.quantizer]
    if config.bits not in method.valid_bits:
        raise ConfigError(
            f"quantizer={config.quantizer!r} has no {config.bits}-bit codes: choose bits from"
            f" {', '.join(map(str, method.valid_bits))}, or another quantizer."
        )
    return method(config.bits, config.group_size)
