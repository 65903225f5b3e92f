// Examples to click, for each kind of question. They are made up here.
export const EXAMPLES = {
  question: [
    { name: "Umbrella", question: "Why do people carry an umbrella?", options: ["to stay dry in the rain", "to catch fish", "to cut paper", "to listen to music"] },
    { name: "Planets", question: "Which of these planets is closest to the sun?", options: ["Mars", "Jupiter", "Mercury", "Neptune"] },
    { name: "Ice", question: "What happens to water when it is cooled below zero degrees Celsius?", options: ["It freezes.", "It boils.", "It burns.", "It evaporates."] },
    { name: "With a text", state: "The museum opens at ten. On Mondays it is closed, and on the first Sunday of a month nobody pays.", question: "When can you visit the museum without paying?", options: ["on Mondays", "on the first Sunday of a month", "every morning before ten"] },
    { name: "Nobody knows", question: "Which number am I thinking of?", options: ["seven", "twelve", "forty", "ninety-one"] },
  ],
  decision: [
    { name: "Who answers?", state: "Where is my money? I sent the shoes back three weeks ago and have written to you twice.", question: "Which team should answer this message?", options: [["billing", "payments and refunds"], ["delivery", "parcels that are late or lost"], ["support", "how a product works"]] },
    { name: "Review", state: "The room was clean and quiet, but breakfast was cold and the staff were rude when we said so.", question: "What is the guest most unhappy about?", options: [["the service", "staff and breakfast"], ["the room", ""], ["the price", ""]] },
    { name: "JSON state", state: "{\"disk_used\": 0.98, \"errors_last_hour\": 412, \"last_deploy\": \"three days ago\"}", question: "What should the operator look at first?", options: [["the disk", "it is nearly full"], ["the network", ""], ["the last deploy", "something that was changed an hour ago"]] },
  ],
  "yes-no": [
    { name: "Urgent?", state: "The server room is on fire. Please call back as soon as you read this!", question: "Is this message urgent?" },
    { name: "A fact", state: "", question: "Is the sun larger than the earth?" },
  ],
  score: [
    { name: "How angry?", state: "I have been on hold for an hour. This is the last time that I buy anything from you.", question: "How angry is the writer?", options: [["calm", ""], ["annoyed", ""], ["angry", ""], ["furious", ""]] },
    { name: "Stars", state: "Nice little lamp. It came late, and one screw was missing, but it looks lovely on my desk.", question: "How many stars would this customer give?", options: [["one star", "very bad"], ["two stars", ""], ["three stars", ""], ["four stars", ""], ["five stars", "perfect"]] },
  ],
  open: [
    { name: "A river", question: "Which river flows through Vienna?" },
    { name: "A number", question: "How many legs does a spider have?" },
    { name: "With a text", state: "The museum opens at ten. On Mondays it is closed, and on the first Sunday of a month nobody pays.", question: "On which day is the museum closed?" },
    { name: "Nobody knows", question: "What is the name of my neighbour's cat?" },
  ],
  table: [
    { name: "Six questions", table: "question,option_a,option_b,option_c,answer\nWhat do bees make?,honey,milk,bread,A\nWhat do you use to write on a blackboard?,chalk,a spoon,a shoe,A\nWhere would you keep milk cold?,in the refrigerator,in the oven,under the bed,A\nWhat is frozen water called?,steam,ice,sand,B\n\"Which of these can fly, if it wants to?\",a stone,a fish tank,a pigeon,C\nWhat do plants need to grow?,light,plastic,noise,A\n" },
  ],
};
