"""Dates as people write them, in ten languages, beside their ISO form: data made on the spot.

Every text has one reading: the day is told from the month by a month name, by the year in front,
or by the dots German uses; two-digit years stand last, behind a month name, and mean 1950 to 2049.
"""

from __future__ import annotations

import datetime
import random
from typing import NamedTuple

from bahdanau_fast import checks

FIRST, LAST = datetime.date(1950, 1, 1), datetime.date(2049, 12, 31)


class Language:
    """How one language writes dates: names, the weekdays from Monday on, and styles for `write`."""

    def __init__(self, *rows: str) -> None:
        names = (row.split() for row in rows[:4])
        self.months, self.short_months, self.weekdays, self.short_weekdays = names
        self.styles = " | ".join(rows[4:]).split(" | ")


_ENGLISH = (
    "January February March April May June July August September October November December",
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec",
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "Mon Tue Wed Thu Fri Sat Sun",
)

LANGUAGES = {
    "American English": Language(
        *_ENGLISH,
        "{month} {d}, {y} | {mon} {d}, {y} | {mon}. {d} {y} | {month} {nth}, {y}",
        "{weekday}, {month} {d}, {y} | {day}., {mon} {d}, {y} | {weekday} {month} {nth} {y}",
        "{mon} {d} '{yy}",
    ),
    "British English": Language(
        *_ENGLISH,
        "{d} {month} {y} | {nth} {month} {y} | {d} {mon} {y} | the {nth} of {month}, {y}",
        "{weekday} {d} {month} {y} | {day} {nth} {mon} {y} | {weekday}, the {nth} of {month} {y}",
        "{dd}-{mon}-{y} | {d} {mon} '{yy}",
    ),
    "French": Language(
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
        "janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc.",
        "lundi mardi mercredi jeudi vendredi samedi dimanche",
        "lun. mar. mer. jeu. ven. sam. dim.",
        "{nth} {month} {y} | le {nth} {month} {y} | {weekday} {nth} {month} {y}",
        "le {weekday} {nth} {month} {y} | {d} {mon} {y} | {day} {d} {mon} {y} | {d} {mon} {yy}",
    ),
    "German": Language(
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
        "Jan. Feb. März Apr. Mai Juni Juli Aug. Sept. Okt. Nov. Dez.",
        "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
        "Mo Di Mi Do Fr Sa So",
        "{d}. {month} {y} | {weekday}, {d}. {month} {y} | {weekday}, den {d}. {month} {y}",
        "am {d}. {month} {y} | {day}, {d}. {mon} {y} | {d}. {mon} {yy} | {dd}.{mm}.{y}",
        "{d}.{m}.{y} | {day}, {dd}.{mm}.{y}",
    ),
    "Spanish": Language(
        "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
        "ene. feb. mar. abr. may. jun. jul. ago. sept. oct. nov. dic.",
        "lunes martes miércoles jueves viernes sábado domingo",
        "lun. mar. mié. jue. vie. sáb. dom.",
        "{d} de {month} de {y} | el {d} de {month} de {y} | {weekday}, {d} de {month} de {y}",
        "el {weekday} {d} de {month} del {y} | {d} {mon} {y} | {day} {d} de {mon} de {y}",
        "{d} {mon} {yy}",
    ),
    "Italian": Language(
        "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre "
        "dicembre",
        "gen. feb. mar. apr. mag. giu. lug. ago. set. ott. nov. dic.",
        "lunedì martedì mercoledì giovedì venerdì sabato domenica",
        "lun. mar. mer. gio. ven. sab. dom.",
        "{nth} {month} {y} | il {nth} {month} {y} | {weekday} {nth} {month} {y}",
        "{weekday}, {d} {month} {y} | {d} {mon} {y} | {day} {d} {mon} {y} | {d} {mon} '{yy}",
    ),
    "Portuguese": Language(
        "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro",
        "jan. fev. mar. abr. mai. jun. jul. ago. set. out. nov. dez.",
        "segunda-feira terça-feira quarta-feira quinta-feira sexta-feira sábado domingo",
        "seg. ter. qua. qui. sex. sáb. dom.",
        "{nth} de {month} de {y} | {weekday}, {nth} de {month} de {y} | em {d} de {month} de {y}",
        "{d} de {mon} de {y} | {day}, {d} {mon} {y} | {d} {mon} {yy}",
    ),
    "Dutch": Language(
        "januari februari maart april mei juni juli augustus september oktober november december",
        "jan. feb. mrt. apr. mei jun. jul. aug. sep. okt. nov. dec.",
        "maandag dinsdag woensdag donderdag vrijdag zaterdag zondag",
        "ma di wo do vr za zo",
        "{d} {month} {y} | {weekday} {d} {month} {y} | op {d} {month} {y} | {d} {mon} {y}",
        "{day} {d} {mon} {y} | {d} {mon} '{yy}",
    ),
    "Chinese": Language(
        "1月 2月 3月 4月 5月 6月 7月 8月 9月 10月 11月 12月",
        "一月 二月 三月 四月 五月 六月 七月 八月 九月 十月 十一月 十二月",
        "星期一 星期二 星期三 星期四 星期五 星期六 星期日",
        "周一 周二 周三 周四 周五 周六 周日",
        "{y}年{month}{d}日 | {y}年{mon}{d}日 | {y}年{month}{d}号 | {y}年{month}{d}日{weekday}",
        "{y}年{mon}{d}日 {day}",
    ),
    "Japanese": Language(
        "1月 2月 3月 4月 5月 6月 7月 8月 9月 10月 11月 12月",
        "01月 02月 03月 04月 05月 06月 07月 08月 09月 10月 11月 12月",
        "月曜日 火曜日 水曜日 木曜日 金曜日 土曜日 日曜日",
        "(月) (火) (水) (木) (金) (土) (日)",
        "{y}年{month}{d}日 | {y}年{mon}{dd}日 | {y}年{month}{d}日{weekday}",
        "{y}年{month}{d}日{day}",
    ),
    "numeric": Language(
        *_ENGLISH, "{y}-{mm}-{dd} | {y}/{mm}/{dd} | {y}/{m}/{d} | {y}.{mm}.{dd} | {y}{mm}{dd}"
    ),
}


class Example(NamedTuple):
    """A date as a person wrote it, as ``2009-04-03``, and the key of its language."""

    text: str
    iso: str
    language: str


def _nth(day: int, language: str) -> str:
    """The day as an ordinal, where the language writes it as one."""
    if language.endswith("English"):
        suffix = "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        return f"{day}{suffix}"
    first = {"French": "1er", "Italian": "1º", "Portuguese": "1º"}
    return first.get(language, "1") if day == 1 else str(day)


def write(date: datetime.date, language: str, style: str) -> str:
    """Fill in a style of a language."""
    names = LANGUAGES[language]
    return style.format(
        d=date.day,
        dd=f"{date.day:02}",
        nth=_nth(date.day, language),
        m=date.month,
        mm=f"{date.month:02}",
        month=names.months[date.month - 1],
        mon=names.short_months[date.month - 1],
        y=date.year,
        yy=f"{date.year % 100:02}",
        weekday=names.weekdays[date.weekday()],
        day=names.short_weekdays[date.weekday()],
    )


def generate(count: int, seed: int = 0) -> list[Example]:
    """Draw dates, no text twice; a longer list of a seed starts with the shorter one."""
    checks.positive_int("count", count)
    rng = random.Random(seed)
    days = (LAST - FIRST).days
    names = list(LANGUAGES)
    recase = (str, str, str, str.lower, str.upper)  # mostly as the language has it
    examples: dict[str, Example] = {}
    while len(examples) < count:
        date = FIRST + datetime.timedelta(days=rng.randint(0, days))
        language = rng.choice(names)
        text = write(date, language, rng.choice(LANGUAGES[language].styles))
        text = rng.choice(recase)(text)
        examples.setdefault(text, Example(text, date.isoformat(), language))
    return list(examples.values())
