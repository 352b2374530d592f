"""The report: what the page says, that it is sound HTML whatever names are, and what it does with poor results."""

import re
import shlex
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from report_data import (
    AUTO,
    FLOAT32,
    FULL,
    OVERHEAD,
    REQUESTS,
    SIGN,
    TOPK,
    bare,
    four_methods,
    grid_of,
    make_results,
    make_run,
    save_results,
)

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations.cli import main
from fedcomp_simulations.config import from_config
from fedcomp_simulations.experiment import Method
from fedcomp_simulations.fleet import Fleet
from fedcomp_simulations.links import PRESETS, link_seconds
from fedcomp_simulations.report import drawing, page, tables, words, write, write_report
from fedcomp_simulations.report.figures import draw_task, save_plot, time_caption
from fedcomp_simulations.report.markup import Markup
from fedcomp_simulations.report.page import Chapter, Section
from fedcomp_simulations.report.targets import Target, reached, target_of
from fedcomp_simulations.report.views import TaskView, view_task
from fedcomp_simulations.results import Results, RunResult, Task
from fedcomp_simulations.study import parse_study

VOID = {"meta", "img", "br"}
MINUS, DASH = "\u2212", "\u2013"


class Page(HTMLParser):
    """Checks the nesting of elements, and keeps them and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += f" {data}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def read(path: Path) -> Page:
    return Page(path.read_text("utf-8"))


def plain(*pieces: Markup) -> str:
    """The text of some HTML, without elements and with simple spaces."""
    text = re.sub(r"\s+", " ", " ".join(Page(piece).text for piece in pieces)).strip()
    return re.sub(r" ([.,:;)])", r"\1", text.replace(MINUS, "-").replace(DASH, "-"))


def view_of(results: Results) -> TaskView:
    ((task, part),) = results.by_task()
    return view_task(results.experiment, "task", task, part)


TASK = 'dataset = "mnist"\nmodel = "mlp"\n[[methods]]\nname = "a"\ncodec = "float32"'

FOUR = view_of(four_methods())
ONE_SEED = view_of(four_methods(1))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report about four methods, one of them called as no method should be."""
    nasty = Method("<script>alert('1')</script> & $x^2$", "int8")
    results = four_methods()
    run = make_run(nasty, per_upload=120, warnings=("<img src=x onerror=alert(2)>",))
    results = replace(results, runs=(*results.runs, run), experiment='a"b<i>')
    return write_report(save_results(results, tmp_path_factory.mktemp("report")))


def test_the_page_is_sound_and_asks_nobody_for_anything(written: Path) -> None:
    page = read(written)
    assert page.all("html") == [{"lang": "en"}]
    assert page.text.count('a"b<i>: which upload for how many bytes') == 2  # title and heading
    assert not page.all("script")
    assert not page.all("link")
    assert all((image["src"] or "").startswith("data:image/svg+xml;base64,") for image in page.all("img"))
    assert all(len(image["alt"] or "") > 40 for image in page.all("img"))
    assert {head["scope"] for head in page.all("th")} == {"col", "row"}
    text = written.read_text("utf-8")
    assert "url(" not in text
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+|http-equiv", "", text)


def test_names_are_shown_as_they_are(written: Path) -> None:
    page = read(written)
    assert "<script>alert('1')</script> & $x^2$" in page.text
    assert "<img src=x onerror=alert(2)>" in page.text
    assert len(page.all("img")) == len(page.all("figure"))


def test_anchors_lead_somewhere_and_are_there_once(tmp_path: Path) -> None:
    save_results(grid_of(0.1, 0.3), tmp_path / "a" / "grid")
    save_results(make_results(bare(make_run(FLOAT32))), tmp_path / "b" / "c")
    save_results(make_results(bare(make_run(SIGN))), tmp_path / "b-c")
    page = read(write_report(tmp_path))
    names = Counter(attributes["id"] for _, attributes in page.found if "id" in attributes)
    assert set(names.values()) == {1}
    assert {(link["href"] or "")[1:] for link in page.all("a")} == set(names)
    assert "3 experiments" in page.text
    assert "a/grid: alpha=0.3" in page.text
    assert sorted(path.name for path in (tmp_path / "figures").iterdir())[:3] == [
        "a-grid--1-front.png",
        "a-grid--1-payload.png",
        "a-grid--1-rounds.png",
    ]
    assert (tmp_path / "figures" / "a-grid-overview.png").is_file()


def test_every_figure_is_a_png_too(written: Path) -> None:
    names = {path.name for path in (written.parent / "figures").iterdir()}
    links = ("nb-iot", "lte-m", "dsl")
    kinds = ("front", "payload", "wire-up", "wire", "rounds", "nmse", "residual", *(f"time-{link}" for link in links))
    assert names == {f"task-{kind}.png" for kind in kinds}
    for name in names:
        assert (written.parent / "figures" / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    folder = save_results(make_results(bare(make_run(FLOAT32)), bare(make_run(SIGN))), tmp_path)
    first = write_report(folder).read_bytes()
    assert write_report(folder, out=tmp_path / "new" / "place").read_bytes() == first
    assert (tmp_path / "new" / "place" / "figures" / "task-front.png").is_file()


# --- views ------------------------------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds_of_what_was_sent_until_then() -> None:
    sign = FOUR.methods[1]
    assert sign.rounds.tolist() == list(range(1, 13))
    assert sign.accuracy[:, -1] == pytest.approx([0.89, 0.88])
    assert sign.payload[[0, 11]].tolist() == [400, 4800]
    assert sign.wire_up is not None
    assert sign.wire is not None
    assert sign.wire_up[-1] == 12 * 2 * (200 + OVERHEAD)
    assert sign.wire[-1] == 12 * 2 * (200 + FULL + 2 * OVERHEAD)
    assert sign.nmse is not None
    assert sign.nmse[:2] == pytest.approx([0.5, 0.25])
    assert FOUR.methods[0].nmse is None
    assert FOUR.methods[0].residual is None


def test_link_time_is_that_of_the_slowest_client_of_each_round() -> None:
    link = PRESETS["nb-iot"]
    once = REQUESTS * link.rtt_s + 8 * (FULL + OVERHEAD) / link.down_bps + 8 * (200 + OVERHEAD) / link.up_bps
    assert FOUR.methods[1].seconds["nb-iot"] == pytest.approx(once * np.arange(1, 13))


def view_with(fleet: object, outcome: str = "ok") -> TaskView:
    """A view of float32 and sign, all of whose exchanges end alike."""
    task = Task("", 1000, 20, 2, settings={"fleet": fleet})
    runs = []
    for run in (make_run(FLOAT32), make_run(SIGN)):
        asked = tuple(tuple(replace(each, outcome=outcome) for each in asked) for asked in run.exchanges)
        runs.append(replace(run, exchanges=asked))
    return view_of(make_results(*runs, tasks=(task,)))


def test_own_links_come_first_and_missing_replies_are_waited_for() -> None:
    view = view_with({"link": "nb-iot", "deadline_s": 18.8}, outcome="late")
    assert [link.name for link in view.links] == ["own", *PRESETS]
    sign = view.methods[1]
    assert sign.seconds["own"] == pytest.approx(18.8 * np.arange(1, 13))
    assert sign.seconds["nb-iot"] == pytest.approx(FOUR.methods[1].seconds["nb-iot"])
    assert sign.seconds["dsl"][0] > REQUESTS * 0.03
    assert time_caption(view.links[0]).endswith("a round ends after 18.8 s, and lasts as long if a reply is missing.")


def test_own_links_count_training_and_who_has_which_link() -> None:
    fleet = {"links": {"nb-iot": 0.5, "dsl": 0.5}, "compute_s": 7.0, "stragglers": 0.5}
    view = view_with(fleet)
    known = from_config(fleet, Fleet)
    run = view.methods[1].runs[0]
    assert view.methods[1].seconds["own"] == pytest.approx(link_seconds(run.exchanges, known.clock(20, 0)))
    on_nb_iot = sum(known.link_of(client, 20, 0) is PRESETS["nb-iot"] for client in range(2))
    assert view.methods[1].joules["own"][-1] == pytest.approx(on_nb_iot * 12 * 2e-4 * (200 + OVERHEAD))
    assert said(view).count("on the experiment's own links (float32:") == 1
    assert "with training and deadlines as they are set. Transmission alone takes" in said(view)
    target = target_of(view, None)
    assert "time on the experiment's own links" in plain(tables.costs(view, target))
    assert [link.name for link in words.named_links(view)] == ["own", "nb-iot", "lte-m", "dsl"]
    assert time_caption(view.links[0]) == (
        "50 % of the clients on NB-IoT, 50 % of the clients on DSL; 7 s of training a round; 5 times as long for 50 % "
        "of the clients."
    )
    alone = view_with({"compute_s": 7.0})
    assert alone.methods[0].seconds["own"] == pytest.approx(7.0 * np.arange(1, 13))
    assert set(alone.methods[0].joules) == {"nb-iot"}
    assert time_caption(alone.links[0]) == "Bytes take no time, as no link is set; 7 s of training a round."


def test_a_preset_that_all_clients_have_is_there_once() -> None:
    links = view_with({"link": "dsl", "loss": 0.1}).links
    assert [link.name for link in links][:2] == ["dsl", "nb-iot"]
    assert time_caption(links[0]).startswith("Transmission alone, as every client has 10 Mbit/s up")
    assert time_caption(links[1]).startswith("Transmission alone, if every client had 20 kbit/s up")
    assert len(view_with({"link": "dsl"}).links) == len(PRESETS)
    assert not any(link.own for link in view_with({}).links)


def test_energy_is_said_of_all_clients_and_of_one() -> None:
    table = plain(tables.times(FOUR, target_of(FOUR, None)))
    assert "Energy of transmission to reach 95 % of float32's accuracy" in table
    spent = 12 * 2 * 2e-4 * (50 + OVERHEAD)  # J, of the whole run; the target is there after half of it
    assert f"3 auto 60 B {spent / 2:.3g} J {1000 * spent / 40:.3g} mJ {spent:.3g} J {1000 * spent / 20:.3g} mJ" in table
    assert "0.2 mJ, -" in plain(tables.link_facts([PRESETS["nb-iot"]]))


@pytest.mark.parametrize("fleet", [7, {"link": "isdn"}, {"speed": 1}, {"dropout": 2.0}])
def test_settings_of_an_impossible_fleet_are_refused(fleet: object) -> None:
    with pytest.raises(FedcompError, match=r"settings of task '': .*fleet") as caught:
        view_with(fleet)
    assert not isinstance(caught.value, ConfigError)  # which the user would have made just now


def test_exchanges_of_clients_that_there_are_not_are_refused() -> None:
    with pytest.raises(FedcompError, match="seed 0: exchanges: expected clients from 0 to 0, got 1"):
        view_of(make_results(make_run(SIGN), tasks=(Task("", 1000, 1, 1),)))


def test_runs_that_were_evaluated_at_other_rounds_meet_where_they_can() -> None:
    sparse, dense = make_run(SIGN, 0, 12), make_run(SIGN, 1, 9)
    sparse = replace(sparse, accuracy_curve=sparse.accuracy_curve[1::2])
    (view,) = view_of(make_results(sparse, dense)).methods
    assert view.rounds.tolist() == [2, 4, 6, 8]
    assert view.wire_up is not None
    assert view.wire_up.tolist() == [2 * n * (200 + OVERHEAD) for n in (2, 4, 6, 8)]
    assert view.nmse is not None
    assert len(view.nmse) == 12
    assert draw_task(view_of(make_results(sparse, dense)), Target(0.8, "0.8"), short=True)


def test_results_without_rounds_and_exchanges_still_have_a_page(tmp_path: Path) -> None:
    page = read(write_report(save_results(make_results(bare(make_run(FLOAT32)), bare(make_run(SIGN))), tmp_path)))
    assert len(page.all("img")) == 3  # front, payload, rounds
    assert "Time on each link" not in page.text
    assert "on all links" not in page.text


def test_the_front_is_what_no_other_beats_for_about_as_few_bytes() -> None:
    assert [view.name for view in FOUR.front] == ["auto 60 B", "sign + EF", "float32"]
    near = make_run(Method("near", "int8"), final=0.87, per_upload=51)  # a byte more than auto, and better
    assert [view.name for view in view_of(make_results(make_run(AUTO), near)).front] == ["near"]
    far = make_run(Method("far", "int8"), final=0.87, per_upload=60)
    assert [view.name for view in view_of(make_results(make_run(AUTO), far)).front] == ["auto 60 B", "far"]


# --- targets ----------------------------------------------------------------------------------------------------------


def test_targets_are_shares_of_float32_or_accuracies() -> None:
    assert (usual := target_of(FOUR, None)).accuracy == pytest.approx(0.95 * 0.895)
    assert usual.words == "95 % of float32's accuracy"
    assert target_of(FOUR, "90 %").accuracy == pytest.approx(0.9 * 0.895)
    assert target_of(FOUR, 0.85) == target_of(FOUR, " 0.85 ") == Target(0.85, "an accuracy of 85 %")
    alone = view_of(make_results(make_run(SIGN)))
    assert (other := target_of(alone, None)).accuracy == pytest.approx(0.95 * 0.89)
    assert other.words == "95 % of the best method's accuracy"


@pytest.mark.parametrize("target", ["", "much", "0", "-0.5", "85", "nan", "inf", "0 %", "nan %", "%"])
def test_other_targets_are_refused_before_anything_is_read(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'accuracy such as 0\.85 or a share of float32\'s such as "95 %", got'):
        write_report(tmp_path / "nowhere", target)


def test_a_target_is_reached_once_three_evaluations_are_there_on_average() -> None:
    curve = (0.5, 0.9, 0.5, 0.8, 0.8, 0.8, 0.2)
    run = replace(make_run(SIGN), accuracy_curve=tuple((n, 100 * n, a) for n, a in enumerate(curve, 1)))
    (view,) = view_of(make_results(run)).methods
    assert reached(view, Target(0.75, "")) == 5  # 0.9 alone is luck
    assert reached(view, Target(0.81, "")) is None
    short = replace(run, accuracy_curve=run.accuracy_curve[:2])
    assert reached(view_of(make_results(short)).methods[0], Target(0.7, "")) == 1


# --- words and tables -------------------------------------------------------------------------------------------------


def said(view: TaskView, target: str | float | None = None) -> str:
    aim = target_of(view, target)
    return plain(words.headline(view, aim), *words.remarks(view, aim))


def test_the_headline_is_the_smallest_upload_that_is_good_enough() -> None:
    text = said(FOUR)
    assert text.startswith("auto 60 B reaches 95.5 % of float32's accuracy (85.5 % against 89.5 %) at 1/80 of the")
    assert "auto 60 B is at -4.0 points (-4.0 to -4.0 by seed)" in text
    assert "Every compressed method loses more than 0.5 points." in text
    assert "1 of 4 methods end below 95 % of float32's accuracy, which is 85.0 %: top-k (59.5 %)." in text
    assert "between its 2 seeds" in text
    assert "± 0.7 points" in text
    assert "Of 192 times that a client was asked, 1 brought nothing usable: 1 late." in text
    assert said(FOUR, "98 %").startswith("sign + EF reaches 98.9 % of float32's accuracy")


def test_link_times_are_said_with_what_is_quickest() -> None:
    text = said(FOUR)
    assert "auto 60 B needs 6 rounds, float32 6. Transmission alone takes" in text
    assert "on NB-IoT (float32:" in text
    assert "Quickest to get there: on NB-IoT auto 60 B" in text


def test_all_bytes_of_a_round_are_said() -> None:
    own, full = 50 + FULL + 2 * OVERHEAD, 2 * FULL + 2 * OVERHEAD
    assert f"a round moves {own / 1000:.3g} kB on a client's link with auto 60 B" in said(FOUR)
    assert f"and {full / 1000:.3g} kB with float32: 1/{full / own:.2g} of all bytes." in said(FOUR)


def test_one_seed_is_said_to_be_one() -> None:
    assert "Only one seed was run" in said(ONE_SEED)
    table = plain(tables.comparison(ONE_SEED))
    assert "one seed" in table
    assert "±" not in table
    assert "-1.0" in table


def test_without_float32_there_is_no_comparison_but_with_its_size() -> None:
    view = view_of(make_results(make_run(SIGN), make_run(TOPK)))
    text = said(view, 0.8)
    assert "sign + EF has the smallest upload that reaches an accuracy of 80 %: 200 B, 1/20 of 4 bytes" in text
    assert "There was no float32 run to compare with." in text
    assert "times smaller* " in plain(tables.comparison(view))


def test_a_float32_that_learned_nothing_is_no_measure() -> None:
    view = view_of(make_results(make_run(FLOAT32, final=0.0), make_run(SIGN), make_run(TOPK)))
    assert target_of(view, None) == Target(0.95 * 0.89, "95 % of the best method's accuracy")
    text = said(view)
    assert "200 B, 1/20 of float32's upload, at an accuracy of 89.0 %. float32 itself ends at an accuracy of 0" in text
    assert ("89.0\u00a0%", "accuracy, with sign + EF") in words.tiles(view, target_of(view, None))
    nobody = view_of(make_results(make_run(FLOAT32, final=0.0), make_run(SIGN, final=0.0)))
    assert said(nobody).startswith("No compressed method has learned anything")
    assert reached(nobody.methods[1], target_of(nobody, None)) is None


def test_a_float32_that_never_uploaded_is_no_measure() -> None:
    view = view_of(make_results(make_run(FLOAT32, per_upload=0, outcome="lost"), make_run(SIGN)))
    text = said(view)
    assert "200 B, 1/20 of 4 bytes per parameter, at an accuracy of 89.0 %. No float32 upload arrived" in text
    assert words.tiles(view, target_of(view, None))[0] == ("1/20", "of 4 bytes per parameter")
    assert "4 bytes per parameter, as no float32 upload arrived." in plain(tables.comparison(view))


def test_only_the_same_seeds_are_compared() -> None:
    view = view_of(make_results(make_run(FLOAT32, 0), make_run(SIGN, 1)))
    text = said(view)
    assert "1/20 of float32's upload, at an accuracy of 88.0 %. float32 was not run with the same seeds" in text
    assert "Every compressed method" not in text
    assert "No method was run with more than one seed" in text
    some = view_of(make_results(make_run(FLOAT32, 0), make_run(SIGN, 1), make_run(AUTO, 0)))
    assert "Every compressed method that shares seeds with float32 loses more than 0.5 points." in said(some)


def test_without_compression_nothing_is_said_of_its_price() -> None:
    text = said(view_of(make_results(make_run(FLOAT32))))
    assert text.startswith("No method has shorter uploads than float32, so there is nothing to recommend.")
    assert "Every compressed method" not in text


def test_about_as_many_bytes_are_said_to_be_so() -> None:
    slight = make_run(SIGN, per_upload=3500, final=0.9)  # of 9.5 kB in all instead of 10 kB
    assert "and 10 kB with float32: about as many." in said(view_of(make_results(make_run(FLOAT32), slight)))
    costly = replace(slight, exchanges=tuple((replace(e, wire_down=15_500),) for (e, _) in slight.exchanges))
    assert "and 10 kB with float32: 2 times as many." in said(view_of(make_results(make_run(FLOAT32), costly)))


def test_a_float32_that_moved_nothing_is_not_compared_by_bytes() -> None:
    silent = make_run(FLOAT32, per_upload=0, outcome="absent")
    silent = replace(silent, exchanges=tuple((replace(e[0], wire_up=0, wire_down=0),) for e in silent.exchanges))
    assert "Counting downloads" not in said(view_of(make_results(silent, make_run(SIGN))))


def test_the_noise_of_comparisons_is_that_of_points() -> None:
    runs = [make_run(FLOAT32, 0), make_run(FLOAT32, 9), make_run(SIGN, 0), make_run(SIGN, 9, final=0.891)]
    text = said(view_of(make_results(*runs)))  # 9 points apart, but against float32 -1.0 and -0.9
    assert "differs by ± 6.3 points" in text
    assert "the points against float32 differ by ± 0.1 between seeds (median), at most ± 0.1" in text


def test_a_method_that_never_uploaded_is_named_and_left_out_of_the_figures(tmp_path: Path) -> None:
    silent = make_run(SIGN, per_upload=0, outcome="failed")
    view = view_of(make_results(make_run(FLOAT32), silent))
    assert "Never uploaded anything: sign + EF." in said(view)
    assert "never uploaded" in plain(tables.comparison(view))
    page = read(write_report(save_results(make_results(silent), tmp_path)))
    assert not page.all("img")
    assert "No compressed method uploaded anything" in page.text


def test_float32_that_never_arrived_is_not_said_to_be_missing() -> None:
    view = view_of(make_results(make_run(FLOAT32, per_upload=0, outcome="lost"), make_run(SIGN)))
    assert "as no float32 upload arrived." in plain(tables.comparison(view))


def test_figures_are_sound_whatever_accuracies_and_names_are() -> None:
    """Nothing learned is no warning of matplotlib, which would be an error here."""
    odd = Method("]]></svg> & sign", "sign", "ef")
    object.__setattr__(odd, "name", "si\x01gn\x1b" + odd.name)  # which experiments refuse
    view = view_of(make_results(make_run(FLOAT32, final=0.0), make_run(odd, final=0.0)))
    for picture in draw_task(view, Target(0.5, "0.5"), short=True):
        assert "sign" in "".join(ElementTree.fromstring(picture.svg).itertext())


def test_names_that_are_no_utf8_do_not_stop_the_page(tmp_path: Path) -> None:
    results = make_results(make_run(SIGN, per_upload=0, outcome="failed"), experiment="caf\udce9")
    assert "caf?: which upload" in read(write_report(save_results(results, tmp_path))).text


def test_nothing_good_enough_is_said_with_the_closest() -> None:
    text = said(view_of(make_results(make_run(FLOAT32), make_run(TOPK))))
    assert text.startswith(
        "No compressed method ends at 95 % of float32's accuracy (85.5 %). The closest is top-k with"
    )
    assert words.tiles(FOUR, Target(0.99, "")) == []


def test_float32_under_a_better_strategy_is_compared_with() -> None:
    better = make_run(Method("float32, FedAvgM", "float32", strategy="fedavgm"), final=0.93, per_upload=FULL)
    text = said(view_of(make_results(make_run(FLOAT32), better, make_run(SIGN))))
    assert "Without compression, float32, FedAvgM is 3.0 points more accurate than plain float32" in text
    assert text.startswith("sign + EF reaches")  # it is not what compresses most


def test_costs_say_what_was_not_reached() -> None:
    table = plain(tables.costs(FOUR, target_of(FOUR, None)))
    assert "What it takes to reach 95 % of float32's accuracy" in table
    assert "3 auto 60 B 6 600 B 12.6 kB 72.6 kB " in table
    assert "4 top-k not reached - - - " in table


def test_settings_and_methods_are_all_there(written: Path) -> None:
    text = " ".join(read(written).text.split())
    for key in (
        "fleet.link nb-iot",
        "alpha 0.3",
        "engine inprocess",
        "python 3.11.7",
        "The same for all: gentle_share",
    ):
        assert key in text
    assert "fedcomp simulate 'a\"b<i>.toml' --seeds 2 --rounds 12" in text


def test_of_two_without_compression_the_second_has_points() -> None:
    other = make_run(replace(FLOAT32, name="other", downlink="plain"), final=0.93, per_upload=FULL)
    table = plain(tables.comparison(view_of(make_results(make_run(FLOAT32), other))))
    assert "1 float32 90.0 - 4,000" in table
    assert "2 other 93.0 +3.0 4,000" in table


def test_refused_replies_are_counted_beside_lost_ones() -> None:
    run = replace(make_run(SIGN, outcome="lost"), failures=8)
    assert "24 times that a client was asked, 8 brought nothing usable: 1 lost, 7 refused." in said(
        view_of(make_results(run))
    )


def test_settings_of_a_varied_table_are_not_called_common_and_the_command_has_the_grid() -> None:
    results = grid_of(0.1)
    made = [
        {"fleet": {"dropout": 0.0}, "clip_norm": float("inf"), "methods.downlink": "pack"},
        {"fleet": {"dropout": 0.5}, "clip_norm": float("inf"), "methods.downlink": "uniform(8)"},
    ]
    tasks = tuple(
        replace(results.tasks[0], name=str(n), grid=grid, settings=grid | {"alpha": 0.3}) for n, grid in enumerate(made)
    )
    runs = [replace(run, task=task.name) for task in tasks for run in results.runs]
    results = make_results(*runs, tasks=tasks)
    views = [view_task(task.name, task.name, task, part) for task, part in results.by_task()]
    shown = plain(
        Markup(page.page([Chapter(results, "x", "x", [Section(view, None, ()) for view in views])]).partition("\n")[2])
    )
    assert "alpha 0.3" in shown
    assert "dropout 0.0" not in shown
    command = shlex.split(shown[shown.index("fedcomp simulate") : shown.index(" Bytes and accuracies")])
    options = [command[n + 1] for n, word in enumerate(command) if word == "--grid"]
    points = parse_study(TASK, name="x", source="x", grid=options).points
    assert len(points) == 4
    assert [point.grid for point in points if point.grid in made] == made


def test_a_grid_has_an_overview(tmp_path: Path) -> None:
    results = grid_of(0.1, 0.3, 1.0)
    results = replace(results, runs=results.runs[:-2])  # the last task was interrupted
    page = read(write_report(save_results(results, tmp_path)))
    text = " ".join(page.text.split())
    assert "Final accuracy over the grid, % task float32 sign + EF alpha=0.1 71.0 71.0 alpha=0.3 73.0 73.0" in text
    assert "No run of this task has finished." in text
    assert "Varied over the tasks: alpha." in text
    assert "alpha 0.3 " not in text[text.index("Settings") :]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (59.6, "1 min"), (90, "1.5 min"), (3599, "1 hour"), (9000, "2.5 hours"), (1e6, "12 days")],
)
def test_durations_have_one_unit(seconds: float, text: str) -> None:
    assert words.format_duration(seconds).replace("\u00a0", " ") == text


# --- files ------------------------------------------------------------------------------------------------------------


def error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def damaged(run: RunResult) -> RunResult:
    return replace(run, by_round=replace(run.by_round, wire_up=(1,)))


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (make_results(), "expected runs, got none"),
        (make_results(make_run(SIGN, final=1.5)), "expected accuracies from 0 to 1"),
        (make_results(damaged(make_run(SIGN))), "by_round: expected lists of one length, got .1, 12."),
    ],
)
def test_results_that_cannot_be_are_refused_with_their_file(results: Results, words: str, tmp_path: Path) -> None:
    with pytest.raises(FedcompError, match=rf"results\.json: .*{words}"):
        write_report(save_results(results, tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_a_run_without_evaluations_is_refused(tmp_path: Path) -> None:
    folder = save_results(make_results(make_run(SIGN)), tmp_path)
    path = folder / "results.json"
    path.write_text(re.sub(r'"accuracy_curve": \[\[.*?\]\]', '"accuracy_curve": []', path.read_text()))
    with pytest.raises(FedcompError, match=r"'sign \+ EF' with seed 0: expected at least one evaluation, got none"):
        write_report(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "got no JSON"),
        ("[]", "expected results in format 2, got none"),
        ('{"format": 1, "runs": []}', "expected results in format 2, got 1"),
        ('{"format": 2}', "incomplete or damaged"),
    ],
)
def test_files_that_are_no_results_are_one_line(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    errors = error(capsys)
    assert errors.startswith(f"fedcomp: {tmp_path / 'results.json'}: ")
    assert words in errors
    assert errors.count("\n") == 1


def test_a_folder_without_results_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert f"expected results.json in it or below, found none; run fedcomp simulate --out {tmp_path}" in error(capsys)
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "expected a folder with results.json" in error(capsys)
    assert main(["report", str(tmp_path), "--target", "85"]) == 2
    assert "target: expected an accuracy such as 0.85" in error(capsys)


def test_the_command_writes_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_results(make_results(bare(make_run(FLOAT32)), bare(make_run(SIGN))), tmp_path / "in")
    assert main(["report", str(folder), "--target", "0.7", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'out' / 'report.html'}\n"
    assert "What it takes to reach an accuracy of 70 %" in read(tmp_path / "out" / "report.html").text
    assert [path.name for path in folder.iterdir()] == ["results.json"]


def test_a_full_disk_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_results(make_results(bare(make_run(FLOAT32))), tmp_path)
    (tmp_path / "report.html").write_text("old")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(write, "replacing", lambda path, mode: (_ for _ in ()).throw(full))
    assert main(["report", str(folder)]) == 1
    first = tmp_path / "figures" / "task-front.png"
    assert error(capsys) == f"fedcomp: cannot write {first}: No space left on device\n"
    assert (tmp_path / "report.html").read_text() == "old"


def test_figures_of_a_former_report_go_and_others_stay(tmp_path: Path) -> None:
    folder = save_results(make_results(make_run(SIGN, per_upload=0, outcome="failed")), tmp_path)
    (figures := tmp_path / "figures").mkdir()
    png = drawing.as_png(drawing.new_axes()[0], "task-1-front")
    for name in ("task-1-front", "slide"):
        (figures / f"{name}.png").write_bytes(png)
    (figures / "mine-front.png").write_bytes(b"mine")
    write_report(folder)
    assert sorted(path.name for path in figures.iterdir()) == ["mine-front.png", "slide.png"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_results(make_results(make_run(SIGN, per_upload=0, outcome="failed")), tmp_path / "in")
    (tmp_path / "file").touch()
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert main(["report", str(folder), "--out", str(tmp_path / "file")]) == 1
    assert error(capsys) == f"fedcomp: cannot write {tmp_path / 'file' / 'figures'}: Not a directory\n"
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert error(capsys) == f"fedcomp: cannot write {tmp_path / 'out' / 'report.html'}: Is a directory\n"


def test_one_picture_stands_for_results_of_one_or_many_tasks(tmp_path: Path) -> None:
    for name, results in {"one": four_methods(1), "many": grid_of(0.1, 1.0)}.items():
        save_plot(results, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_of_many_methods_each_has_a_number_and_few_a_colour() -> None:
    runs = [make_run(FLOAT32)]
    for n in range(1, 23):  # the more bytes the better, but for those from 6 to 9
        final = 0.6 + n / 100 - 0.1 * (6 <= n <= 9)
        runs.append(make_run(Method(f"method {n}", f"topk({n / 1000})"), final=final, per_upload=50 + 9 * n))
    view = view_of(make_results(*runs))
    front, payload = draw_task(view, target_of(view, None), short=True)
    key = re.findall(r">(\d+)\s+(?:float32|method (\d+))</text>", payload.svg.decode())
    assert key == [("1", ""), *((str(n + 1), str(n)) for n in range(1, 23))]
    styles = drawing.styles(view)
    assert [number for number, style in styles.items() if not style.strong] == [7, 8, 9, 10]
    strong = [(style.colour, style.dash) for style in styles.values() if style.strong]
    assert len(set(strong)) == len(strong) == 19
    assert "method 22 82.0" in front.alt
    assert "Grey: methods that another one beats" in payload.caption


CHROMIUM = shutil.which("chromium")
MEASURE = """<script>
const width = document.documentElement.clientWidth
const out = [...document.querySelectorAll("body *")].filter(
  e => !e.closest(".scroll table") && e.getBoundingClientRect().right > width + 0.5)
document.title = `width ${width}, scrolls to ${document.documentElement.scrollWidth}, out ${out.map(e => e.tagName)}`
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_of_a_phone_or_a_screen(width: int, written: Path, tmp_path: Path) -> None:
    text = written.read_text("utf-8")
    inner = re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</body>", f"{MEASURE}</body>")
    frame = f'<iframe style="border: 0" width="{width}" height="900" srcdoc="{escape(inner)}"></iframe>'
    told = "<script>onload = () => { document.title = frames[0].document.title }</script>"
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><body>{frame}{told}</body>")
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync dump-dom"
    )
    done = subprocess.run(
        [str(CHROMIUM), *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1400,1000", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r"<title>width (\d+), scrolls to (\d+), out(.*?)</title>", done.stdout)
    assert found is not None
    assert width - 20 <= int(found[1]) <= width  # less a scroll bar
    assert (found[2], found[3]) == (found[1], "")
