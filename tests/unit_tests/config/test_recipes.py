"""A recipe is found by the name of its module, and a wrong name says which ones there are."""

import pytest
from torchtitan.config.recipes import CommandLineError, known_modules, RecipeModule

SAMPLE = "tests.unit_tests.config.sample_runs"


@pytest.mark.parametrize("name", [SAMPLE, f"{SAMPLE}.config_registry"])
def test_a_package_and_its_registry_module_lead_to_the_same_recipe(name: str):
    assert RecipeModule(name).recipe("small")().training.steps == 7


def test_recipes_are_the_lower_case_callables_that_need_no_argument():
    assert RecipeModule(SAMPLE).recipe_names() == [
        "broken",
        "broken_inside",
        "in_trouble",
        "no_config",
        "saving",
        "small",
    ]


@pytest.mark.parametrize(
    "name", ["no_such_package", ".relative", "no/path.py", f"{SAMPLE}.nothing"]
)
def test_a_module_that_is_nowhere_is_an_import_error_with_the_known_names(name: str):
    with pytest.raises(ImportError, match=f"^Cannot import module '{name}'") as raised:
        RecipeModule(name)
    assert isinstance(raised.value, CommandLineError)
    assert all(known in str(raised.value) for known in known_modules())


def test_a_module_that_exists_but_fails_to_import_says_why():
    with pytest.raises(ImportError) as raised:
        RecipeModule("tests.unit_tests.config.broken_runs")
    assert "exists but fails to import" in str(raised.value)
    assert "a_package_that_nobody_has" in str(raised.value)
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_short_name_without_recipes_names_the_places_that_were_tried(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("torchtitan.models._supported_models", frozenset({"phantom"}))
    with pytest.raises(
        ImportError, match="^Cannot import config_registry for module 'phantom'"
    ) as raised:
        RecipeModule("phantom")
    assert "torchtitan.models.phantom.config_registry" in str(raised.value)
    assert "torchtitan.experiments.phantom.config_registry" in str(raised.value)


@pytest.mark.parametrize("name", ["smal", "__name__"])
def test_an_unknown_recipe_lists_the_known_ones(name: str):
    with pytest.raises(ValueError, match="Available config functions: broken, .*small"):
        RecipeModule(SAMPLE).recipe(name)
