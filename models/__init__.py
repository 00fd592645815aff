"""Tested models and pairs, as TOML files beside this one; `draftc.export.catalog` reads them."""

__all__: list[str] = []
